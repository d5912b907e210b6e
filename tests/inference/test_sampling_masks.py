"""Sampling masks and the choice of logprobs with the fake engine, along every way to sample."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes import strike

import sglrl

IDS = [3, 1, 4, 1, 5, 999]
MASKED: dict[str, Any] = {"top_p": 0.9, "return_sampling_mask": True}


def expected(count: int, begin: int = 0) -> list[list[int]]:
    """Return the sets of the fake engine: the token, and the i % 3 ids after it."""
    return [
        sorted((IDS[at % len(IDS)] + more) % 1000 for more in range(1 + at % 3))
        for at in range(begin, begin + count)
    ]


def sets(mask: sglrl.SamplingMask | None) -> list[list[int]]:
    assert mask is not None
    return [ids.tolist() for ids in mask.sets()]


@pytest.fixture
async def client() -> AsyncIterator[sglrl.Client]:
    async with sglrl.launch(
        "fake", engine="fake", tokens_per_step=4, vocab_size=1000, context_length=128
    ) as client:
        yield client


async def test_calls_and_streams(client: sglrl.Client) -> None:
    made = await client.generate(input_ids=IDS, max_new_tokens=30, top_logprobs=2, **MASKED)
    assert sets(made.sampling_mask) == expected(30)
    several = await client.generate(input_ids=IDS, n=3, max_new_tokens=5, **MASKED)
    assert [sets(one.sampling_mask) for one in several] == [expected(5)] * 3
    stream = client.stream(input_ids=IDS, max_new_tokens=30, **MASKED)
    chunks = [chunk async for chunk in stream]
    assert len(chunks) > 1
    assert [one for chunk in chunks for one in sets(chunk.sampling_mask)] == expected(30)
    assert sets(stream.completion.sampling_mask) == expected(30)
    plain = await client.generate(input_ids=IDS, max_new_tokens=5, top_p=0.9)
    assert plain.sampling_mask is None


async def test_a_client_in_another_place(client: sglrl.Client) -> None:
    async with sglrl.connect(client.address) as remote:
        made = await remote.generate(input_ids=IDS, max_new_tokens=30, **MASKED)
        assert sets(made.sampling_mask) == expected(30)
        scores = await remote.score(IDS, temperature=2.0)
        np.testing.assert_allclose(scores, (await client.score(IDS)) / 2)


async def one_turn(session: sglrl.Session, item: object) -> float:
    await session.generate()
    return 1.0


async def test_turns_and_rollouts(client: sglrl.Client) -> None:
    async with client.session(input_ids=IDS, **MASKED) as session:
        await session.generate(max_new_tokens=3)
        session.observe([7, 8])
        await session.generate(max_new_tokens=2, return_sampling_mask=False)
        trajectory = session.trajectory()
    assert sets(trajectory.sampling_mask) == [*expected(3), [], [], [], []]

    for processes in (None, 1):
        run = sglrl.rollout(
            client,
            one_turn,
            [{"input_ids": IDS}],
            group_size=2,
            processes=processes,
            max_new_tokens=4,
            logprobs_mode="processed_logprobs",
            **MASKED,
        )
        (group,) = [group async for group in run]
        for trajectory in group.trajectories:
            assert sets(trajectory.sampling_mask) == expected(4)


async def test_a_call_continues_on_another_worker(tmp_path: Path) -> None:
    count = 300
    hang_file = tmp_path / "hang"
    hang_file.write_text("105")
    async with sglrl.launch(
        "fake",
        engine="fake",
        replicas=2,
        restarts=0,
        tokens_per_step=5,
        step_seconds=0.002,
        vocab_size=1000,
        context_length=512,
        hang_file=str(hang_file),
    ) as client:
        stream = client.stream(input_ids=IDS, max_new_tokens=count, **MASKED)
        seen: list[list[int]] = []
        killed = False
        async for chunk in stream:
            seen += sets(chunk.sampling_mask)
            if len(seen) > 100 and not killed:
                killed = True
                (busy,) = [worker for worker in client.workers if worker.load]
                strike(busy.pid, signal.SIGKILL)
                hang_file.unlink(missing_ok=True)
        assert stream.completion.resumed == 1
        assert seen == sets(stream.completion.sampling_mask) == expected(count)


async def test_an_aborted_call_has_the_masks_of_its_tokens() -> None:
    async with sglrl.launch(
        "fake",
        engine="fake",
        tokens_per_step=1,
        step_seconds=0.001,
        vocab_size=1000,
        context_length=1 << 16,
    ) as client:
        stream = client.stream(input_ids=IDS, max_new_tokens=50_000, **MASKED)
        chunks = aiter(stream)
        await anext(chunks)
        await client.abort()
        rest = [chunk async for chunk in chunks]
        assert rest[-1].finish_reason == "abort"
        made = stream.completion
        assert sets(made.sampling_mask) == expected(len(made.output_ids))


BAD: list[tuple[dict[str, Any], str]] = [
    ({"logprobs_mode": "raw"}, "logprobs_mode must be one of 'raw_logprobs'.*got 'raw'"),
    ({"logprobs_mode": 3}, "got 3"),
    ({"logprobs_mode": ["raw_logprobs"]}, "got "),
    ({"return_sampling_mask": 1, "top_p": 0.5}, "must be True or False"),
    ({"return_sampling_mask": True}, "set top_p, top_k or min_p"),
    ({"return_sampling_mask": True, "logit_bias": {3: 1.0}}, "set top_p, top_k or min_p"),
    ({"logprob_mode": "raw_logprobs"}, "did you mean 'logprobs_mode'"),
]


@pytest.mark.parametrize(("values", "says"), BAD)
async def test_wrong_values_are_never_sent(
    client: sglrl.Client, values: dict[str, Any], says: str
) -> None:
    with pytest.raises(sglrl.InvalidRequest, match=says):
        await client.generate(input_ids=IDS, **values)
    with pytest.raises(sglrl.InvalidRequest, match=says):
        client.session(input_ids=IDS, **values)
    assert client.pool.driver.fabric._next_id == 0


@pytest.mark.parametrize(
    "values",
    [{"top_k": 5}, {"min_p": 0.1}, {"top_p": 0.5}, {"temperature": 0}, {"regex": "a+"}],
)
async def test_what_limits_the_tokens(client: sglrl.Client, values: dict[str, Any]) -> None:
    made = await client.generate(
        input_ids=IDS, max_new_tokens=2, return_sampling_mask=True, **values
    )
    assert sets(made.sampling_mask) == expected(2)


@pytest.mark.parametrize("temperature", [0, -1.0, float("nan"), float("inf"), "hot", True, None])
async def test_temperatures_of_scores(client: sglrl.Client, temperature: Any) -> None:
    with pytest.raises(sglrl.InvalidRequest, match="temperature"):
        await client.score(IDS, temperature=temperature)
    assert client.pool.driver.fabric._next_id == 0
    found = await client.score(IDS, temperature=4, top_logprobs=2)
    plain = await client.score(IDS, top_logprobs=2)
    np.testing.assert_allclose(found.logprobs, plain.logprobs / 4)
    np.testing.assert_allclose(found.top_logprobs, plain.top_logprobs / 4)


async def test_calls_together(client: sglrl.Client) -> None:
    """Only the calls that ask for masks have them."""
    made = await asyncio.gather(
        *(
            client.generate(input_ids=IDS, max_new_tokens=9, **(MASKED if i % 2 else {}))
            for i in range(20)
        )
    )
    assert [one.sampling_mask is not None for one in made] == [False, True] * 10
