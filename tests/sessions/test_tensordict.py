"""Trajectories as tensors, against a slow and simple reference; and in TorchRL's ReplayBuffer."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from core.trajectories import trajectories
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torchrl.data import (
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    SamplerWithoutReplacement,
)

from sglrl.config import install
from sglrl.errors import UsageError
from sglrl.sessions.tensors import stack
from sglrl.sessions.trajectory import Trajectory
from sglrl.sessions.turn import Turn

DTYPES = {
    "input_ids": torch.int64,
    "attention_mask": torch.bool,
    "loss_mask": torch.bool,
    "logprobs": torch.float32,
    "versions": torch.int64,
    "turn_ids": torch.int64,
    "rewards": torch.float32,
}
PADDING = (0, False, False, 0.0, -1, -1, 0.0)
TOTALS = {
    "reward": torch.float32,
    "sample": torch.int64,
    "prompt_length": torch.int64,
    "response_length": torch.int64,
    "turn_count": torch.int64,
    "truncated": torch.bool,
}


def rows_of(trajectory: Trajectory) -> list[tuple[Any, ...]]:
    """Return one row per token, with the columns of ``DTYPES``."""
    prompt = len(trajectory.prompt_ids)
    rewards = [np.float32(0)] * len(trajectory.input_ids)
    for turn in trajectory.turns:
        rewards[prompt + turn.stop - 1] += np.float32(turn.reward)
    rows: list[tuple[Any, ...]] = []
    for at, token in enumerate(trajectory.input_ids.tolist()):
        i = at - prompt
        inside = [n for n, turn in enumerate(trajectory.turns) if turn.start <= i < turn.stop]
        turn_id = inside[0] if inside else -1
        reward = float(rewards[at])
        if i < 0:
            rows.append((token, True, False, 0.0, -1, turn_id, reward))
            continue
        kept = bool(trajectory.loss_mask[i])
        logprob = float(trajectory.logprobs[i])
        rows.append((token, True, kept, logprob, int(trajectory.versions[i]), turn_id, reward))
    return rows


def columns(rows: Sequence[tuple[Any, ...]]) -> dict[str, torch.Tensor]:
    return {
        key: torch.tensor([row[n] for row in rows], dtype=dtype)
        for n, (key, dtype) in enumerate(DTYPES.items())
    }


def assert_tokens(found: TensorDict, rows: Sequence[tuple[Any, ...]]) -> None:
    for key, expected in columns(rows).items():
        torch.testing.assert_close(found[key], expected, rtol=0, atol=0, msg=key)


def assert_totals(found: TensorDict, batch: Sequence[Trajectory]) -> None:
    for key, dtype in TOTALS.items():
        assert found[key].dtype == dtype
        assert found[key].shape == (len(batch),)
    for n, one in enumerate(batch):
        with np.errstate(over="ignore"):
            # A sum of large rewards may exceed float32.
            assert found["reward"][n] == np.float32(one.reward)
        assert found["sample"][n] == n
        assert found["prompt_length"][n] == len(one.prompt_ids)
        assert found["response_length"][n] == len(one.response_ids)
        assert found["turn_count"][n] == len(one.turns)
        assert found["truncated"][n] == (one.finish_reason in ("length", "abort"))


def make(prompt: int, response: int, *, start: int = 0, **metadata: Any) -> Trajectory:
    mask = [at >= start for at in range(response)]
    return Trajectory(
        prompt_ids=np.arange(1, prompt + 1, dtype=np.int32),
        response_ids=np.arange(100, 100 + response, dtype=np.int32),
        loss_mask=np.array(mask),
        logprobs=np.array([-0.5 * kept for kept in mask], np.float32),
        versions=np.array([3 if kept else -1 for kept in mask], np.int32),
        turns=(Turn(start=start, stop=response, reward=1.0),),
        metadata=metadata,
    )


batches = st.lists(trajectories(), min_size=1, max_size=4)


# --- padded ---------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=30)
@given(batches, st.integers(1, 8), st.integers(0, 5) | st.none(), st.booleans(), st.integers(0, 9))
def test_padded(
    batch: list[Trajectory], multiple: int, more: int | None, left: bool, pad_token_id: int
) -> None:
    longest = max(len(one.input_ids) for one in batch)
    found = stack(
        batch,
        pad_token_id=pad_token_id,
        pad_to=None if more is None else longest + more,
        pad_to_multiple_of=multiple,
        padding_side="left" if left else "right",
    )
    width = longest + (more or 0)
    while width % multiple:
        width += 1
    assert found.batch_size == (len(batch),)
    assert set(found.keys()) == {*DTYPES, *TOTALS}
    for n, one in enumerate(batch):
        padding = [(pad_token_id, *PADDING[1:])] * (width - len(one.input_ids))
        rows = [*padding, *rows_of(one)] if left else [*rows_of(one), *padding]
        assert_tokens(found[n], rows)
    assert_totals(found, batch)


@settings(deadline=None, max_examples=30)
@given(trajectories())
def test_one_alone_has_no_batch_dimension(one: Trajectory) -> None:
    for layout in ("padded", "jagged"):
        found = one.to_tensordict(layout)
        assert found.batch_size == ()
        assert_tokens(found, rows_of(one))
    assert one.to_tensordict(pad_to=40)["input_ids"].shape == (40,)


def test_rewards_stand_at_the_last_token_of_their_turn() -> None:
    one = Trajectory(
        prompt_ids=np.array([1, 2], np.int32),
        response_ids=np.array([3, 4, 5, 6], np.int32),
        loss_mask=np.array([True, True, False, True]),
        logprobs=np.array([-1, -2, 0, -3], np.float32),
        versions=np.array([0, 0, -1, 1], np.int32),
        turns=(
            Turn(start=0, stop=0, reward=8.0, finish_reason="abort"),
            Turn(start=0, stop=2, reward=0.25),
            Turn(start=3, stop=4, reward=0.5),
            Turn(start=4, stop=4, reward=4.0, finish_reason="abort"),
        ),
    )
    found = one.to_tensordict()
    assert found["rewards"].tolist() == [0, 8, 0, 0.25, 0, 4.5]
    assert found["turn_ids"].tolist() == [-1, -1, 1, 1, -1, 2]
    assert found["reward"] == found["rewards"].sum() == 12.75
    assert found["truncated"]


def test_a_turns_advantage_reaches_its_tokens() -> None:
    """``turn_ids`` maps each token to its turn's advantage."""
    batch = [make(2, 3, start=1), make(1, 2)]
    found = stack(batch)
    by_turn = torch.tensor([[0.5], [-0.5]])
    by_token = by_turn.gather(1, found["turn_ids"].clamp(min=0)) * found["loss_mask"]
    assert by_token.tolist() == [[0, 0, 0, 0.5, 0.5], [0, -0.5, -0.5, 0, 0]]


# --- jagged ---------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=30)
@given(batches)
def test_jagged(batch: list[Trajectory]) -> None:
    found = stack(batch, "jagged")
    assert found.batch_size == (len(batch),)
    assert set(found.keys()) == {*DTYPES, *TOTALS}
    ends = np.cumsum([len(one.input_ids) for one in batch]).tolist()
    for key in DTYPES:
        assert found[key].layout == torch.jagged
        assert found[key].offsets().tolist() == [0, *ends]
    for n, one in enumerate(batch):
        assert_tokens(found[n], rows_of(one))
    assert_totals(found, batch)


def test_jagged_keys_can_be_computed_with_each_other() -> None:
    found = stack([make(2, 3, start=1), make(1, 2)], "jagged")
    masked = found["logprobs"].exp() * found["loss_mask"] + found["rewards"]
    p = float(np.exp(np.float32(-0.5)))
    expected = torch.tensor([0, 0, 0, p, p + 1, 0, p, p + 1])
    torch.testing.assert_close(masked.values(), expected)


# --- metadata -------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["padded", "jagged"])
@pytest.mark.parametrize("size", [1, 2])
def test_metadata_goes_along(layout: Any, size: int) -> None:
    batch = [
        make(1, 2, group=np.int64(4), score=1, right=True, answer="a", row=[1, 2]),
        make(2, 1, group=np.int64(5), score=0.5, right=False, answer="b", row=[3]),
    ][:size]
    names = ["group", "score", "right", "answer", "row"]
    found = stack(batch, layout, metadata=names)
    assert found["metadata", "group"].tolist() == [4, 5][:size]
    assert found["metadata", "group"].dtype == torch.int64
    assert found["metadata", "right"].dtype == torch.bool
    for n, one in enumerate(batch):
        for name in names:
            assert found[n]["metadata", name] == one.metadata[name], name


def test_all_of_it_is_on_the_cpu() -> None:
    """The device is the CPU even if the program has another default device and dtype."""
    torch.set_default_device("meta")
    torch.set_default_dtype(torch.float64)
    try:
        found = stack([make(1, 2, score=0.5), make(2, 1, score=1)], metadata=["score"])
    finally:
        torch.set_default_device("cpu")
        torch.set_default_dtype(torch.float32)
    assert {value.device.type for value in found.values(True, True)} == {"cpu"}
    assert found["metadata", "score"].dtype == found["reward"].dtype == torch.float32


# --- invalid input --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "options", "says"),
    [
        ([], {}, "there are no trajectories"),
        ([make(2, 3)], {"pad_to": 4}, "a trajectory has 5 tokens, more than pad_to=4"),
        ([make(2, 3)], {"pad_to_multiple_of": 0}, "pad_to_multiple_of must be at least 1, not 0"),
        ([make(2, 3)], {"padding_side": "up"}, 'padding_side must be "right" or "left", not \'up'),
        ([make(2, 3)], {"layout": "ragged"}, 'layout must be "padded" or "jagged", not \'ragged'),
        ([make(2, 3)], {"layout": "jagged", "pad_to": 9}, "the jagged layout has no padding"),
        ([make(2, 3)], {"layout": "jagged", "pad_to_multiple_of": 8}, "layout has no padding"),
        ([make(2, 3)], {"pad_to_multiple_of": 2.5}, "pad_to_multiple_of must be an integer"),
        (
            [make(2, 3)],
            {"layout": "jagged", "padding_side": "up"},
            'padding_side must be "right" or "left"',
        ),
        ([make(2, 3, a=1 << 63)], {"metadata": ["a"]}, "the metadata 'a' is not a tensor"),
        ([make(2, 3, a=1), make(2, 3)], {"metadata": ["a"]}, "not every trajectory has 'a' in its"),
    ],
)
def test_what_cannot_be_stacked(
    batch: list[Trajectory], options: dict[str, Any], says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        stack(batch, **options)


def test_without_tensordict_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensordict", None)
    with pytest.raises(ImportError, match=re.escape(install("torchrl"))):
        make(1, 1).to_tensordict()


# --- TorchRL --------------------------------------------------------------------------------------

BATCH = [
    make(1, 1, group=0),
    make(2, 3, start=1, group=0),
    make(3, 2, group=1),
    make(4, 4, group=1),
]


def buffer(storage: Any, **options: Any) -> ReplayBuffer:
    return ReplayBuffer(
        storage=storage, sampler=SamplerWithoutReplacement(), batch_size=len(BATCH), **options
    )


def in_order(sample: TensorDict) -> list[TensorDict]:
    """Return the sample's items in the order of ``BATCH``, in which prompts grow."""
    items = list(sample.unbind(0))
    items.sort(key=lambda item: int(item["prompt_length"]))
    assert [int(item["prompt_length"]) for item in items] == [1, 2, 3, 4]
    return items


@pytest.mark.parametrize("storage", [LazyTensorStorage, LazyStackStorage])
def test_padded_in_a_replay_buffer(storage: Any) -> None:
    replay = buffer(storage(10))
    # Both batches have the same width.
    replay.extend(stack(BATCH[:2], pad_to=8, metadata=["group"]))
    replay.extend(stack(BATCH[2:], pad_to=8, metadata=["group"]))
    assert len(replay) == 4
    sample = replay.sample()
    assert sample["input_ids"].shape == (4, 8)
    for one, item in zip(BATCH, in_order(sample), strict=True):
        assert_tokens(item, [*rows_of(one), *[PADDING] * (8 - len(one.input_ids))])
        assert item["metadata", "group"] == one.metadata["group"]
        assert item["reward"] == 1.0


def test_jagged_in_a_replay_buffer() -> None:
    replay = buffer(LazyStackStorage(10))
    replay.extend(stack(BATCH, "jagged", metadata=["group"]))
    sample = replay.sample()
    for one, item in zip(BATCH, in_order(sample), strict=True):
        assert_tokens(item, rows_of(one))
        assert item["metadata", "group"] == one.metadata["group"]
    nested = sample.get("logprobs", as_nested_tensor=True, layout=torch.jagged)
    assert sorted(nested.offsets().diff().tolist()) == [2, 5, 5, 8]


def test_one_at_a_time_in_a_replay_buffer() -> None:
    replay = buffer(LazyStackStorage(10))
    for one in BATCH:
        replay.add(one.to_tensordict())
    for one, item in zip(BATCH, in_order(replay.sample()), strict=True):
        assert_tokens(item, rows_of(one))


def test_trajectories_themselves_in_a_replay_buffer() -> None:
    """Trajectories are stored as they are, and padded only as wide as the sample needs."""
    replay = buffer(ListStorage(10), collate_fn=stack)
    replay.extend(BATCH)
    sample = replay.sample()
    assert sample["input_ids"].shape == (4, 8)
    for one, item in zip(BATCH, in_order(sample), strict=True):
        assert_tokens(item, [*rows_of(one), *[PADDING] * (8 - len(one.input_ids))])
