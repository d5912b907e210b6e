"""Sessions on the fake engine: turns, observations, rewards and trajectories."""

from __future__ import annotations

import asyncio
import inspect
import weakref
from typing import Any, ClassVar

import numpy as np
import pytest

import sglrl

from .agents import (
    ITEMS,
)


async def test_a_trajectory_is_what_happened(client: sglrl.Client) -> None:
    session = client.session(input_ids=[4, 5], max_new_tokens=3, metadata={"who": "me"})
    async with session:
        assert session.ids.tolist() == []
        turn = await session.generate()
        session.reward(0.25)
        session.observe(np.array([9, 9], np.int32))
        session.observe([8])
        await session.generate(max_new_tokens=5)
        session.observe([6])
        trajectory = session.trajectory(reward=1.0)
    assert turn.output_ids.tolist() == [4, 5, 4]
    assert trajectory.prompt_ids.tolist() == [4, 5]
    assert trajectory.response_ids.tolist() == [4, 5, 4, 9, 9, 8, 4, 5, 4, 5, 4]
    assert trajectory.loss_mask.tolist() == [True] * 3 + [False] * 3 + [True] * 5
    table = [-(i + 1) / 1024 for i in range(5)]
    np.testing.assert_allclose(trajectory.logprobs, [*table[:3], 0, 0, 0, *table])
    assert trajectory.versions.tolist() == [0, 0, 0, -1, -1, -1, 0, 0, 0, 0, 0]
    assert trajectory.rewards.tolist() == [0.25, 1.0]
    assert [(t.start, t.stop, t.prompt_tokens) for t in trajectory.turns] == [(0, 3, 2), (6, 11, 8)]
    assert trajectory.finish_reason == "length"
    assert trajectory.metadata == {"who": "me"}
    assert 0 < trajectory.timing.generating <= trajectory.timing.total


async def test_the_prompts_of_all_turns_are_the_same_memory(client: sglrl.Client) -> None:
    """One copy per turn would cost memory quadratic in the number of turns."""
    async with client.session(input_ids=[4, 5, 6], max_new_tokens=4) as session:
        seen = []
        for turn in range(6):
            seen.append(session.ids.tolist() or [4, 5, 6])
            if turn:
                session.observe([turn])
                seen[-1].append(turn)
            await session.generate()
    prompts = [turn.prompt_ids for turn in session.turns]
    assert [prompt.tolist() for prompt in prompts] == seen
    assert [turn.prompt_tokens for turn in session.turns] == [len(ids) for ids in seen]
    assert all(np.shares_memory(prompt, prompts[-1]) for prompt in prompts)


async def test_what_a_session_refuses(client: sglrl.Client) -> None:
    session = client.session(input_ids=[1], max_new_tokens=2)
    with pytest.raises(sglrl.UsageError, match="no turn"):
        session.trajectory()
    with pytest.raises(sglrl.UsageError, match="no turn"):
        session.reward(1.0)
    with pytest.raises(sglrl.InvalidRequest, match="outside the vocabulary"):
        session.observe([1000])
    with pytest.raises(sglrl.InvalidRequest, match="text, token ids or messages, got int"):
        session.observe(3)  # type: ignore[arg-type]
    with pytest.raises(sglrl.InvalidRequest, match="did you mean"):
        await session.generate(max_new_token=3)
    turn = asyncio.ensure_future(session.generate())
    await asyncio.sleep(0)
    with pytest.raises(sglrl.UsageError, match="being sampled"):
        await session.generate()
    await turn
    with pytest.raises(sglrl.UsageError, match="finite"):
        session.reward(float("nan"))
    session.close()
    with pytest.raises(sglrl.Closed):
        await session.generate()


class Several:
    """Raises in ``float()``, like a tensor of several numbers."""

    def __float__(self) -> float:
        raise RuntimeError("there are several")


@pytest.mark.parametrize("value", [None, "x", [1.0, 2.0], 10**400, Several()], ids=type)
async def test_rewards_that_are_no_numbers(client: sglrl.Client, value: Any) -> None:
    session = client.session(input_ids=[1], max_new_tokens=2)
    await session.generate()
    with pytest.raises(sglrl.UsageError, match="a reward must be a number"):
        session.reward(value)


@pytest.mark.parametrize("kind", [list, tuple, np.array])
async def test_tokenizers_that_give_no_lists(client: sglrl.Client, kind: Any) -> None:
    class Tokenizer:
        all_special_tokens: ClassVar[list[str]] = []

        def __len__(self) -> int:
            return 1000

        def __call__(self, texts: list[str], **options: Any) -> dict[str, Any]:
            return {"input_ids": [kind([*text.encode()]) for text in texts]}

    client.tokenizer_box._tokenizer = Tokenizer()
    session = client.session("ab", max_new_tokens=1)
    await session.generate()
    session.observe("cd")
    await session.generate()
    assert session.ids.tolist() == [97, 98, 97, 99, 100, 97]


async def test_a_session_is_an_object_like_others(client: sglrl.Client) -> None:
    session = client.session(input_ids=[1])
    session.tool = "mine"  # type: ignore[attr-defined]
    assert weakref.ref(session)() is session
    assert "Sample the next turn" in (inspect.getdoc(sglrl.Session.generate) or "")
    assert inspect.iscoroutinefunction(sglrl.Session.generate)


async def test_turns_fit_the_context_until_it_is_full(client: sglrl.Client) -> None:
    session = client.session(input_ids=[1] * 100)
    assert session.room > 0
    turn = await session.generate(max_new_tokens=100)
    assert len(turn.output_ids) == 100
    turn = await session.generate(max_new_tokens=1000)
    assert len(turn.output_ids) + 200 == len(session.ids)
    assert session.room == 0
    with pytest.raises(sglrl.InvalidRequest, match=r"context is full.*Session\.room"):
        await session.generate()


async def test_a_cancelled_turn_did_not_happen() -> None:
    async with sglrl.launch(
        "fake", engine="fake", tokens_per_step=1, step_seconds=0.002, context_length=10_000
    ) as client:
        session = client.session(input_ids=[5, 6])
        session.observe([7])
        turn = asyncio.ensure_future(session.generate(max_new_tokens=5000))
        # Once this call to the same worker is answered, the turn has reached the worker.
        await client.generate(input_ids=[1], max_new_tokens=1)
        assert client.workers[0].load == 1
        turn.cancel()
        with pytest.raises(asyncio.CancelledError):
            await turn
        completion = await session.generate(max_new_tokens=2)
        assert completion.prompt_ids.tolist() == [5, 6, 7]
        with pytest.raises(sglrl.DeadlineExceeded):
            await client.session(input_ids=[1], timeout=0.05).generate(max_new_tokens=5000)


async def test_what_was_observed_waits_for_a_turn_that_succeeds(client: sglrl.Client) -> None:
    async with client.session(input_ids=[4, 5], max_new_tokens=4) as session:
        await session.generate()
        before, room = session.ids.tolist(), session.room
        session.observe([7, 7])
        assert session.room == room - 2
        turn = asyncio.create_task(session.generate(max_new_tokens=200))
        await asyncio.sleep(0)
        session.observe([8])
        turn.cancel()
        with pytest.raises(asyncio.CancelledError):
            await turn
        assert session.ids.tolist() == before
        assert len(session.trajectory().response_ids) == 4
        again = await session.generate()
        assert again.prompt_ids.tolist() == [*before, 7, 7, 8]
        # An observation that does not fit can be removed.
        session.observe([9] * 300)
        assert session.room == 0
        with pytest.raises(sglrl.InvalidRequest, match="unobserve"):
            await session.generate()
        assert len(session.trajectory().input_ids) == len(before) + 3 + 4
        session.unobserve()
        session.observe([])
        session.observe(np.array([], np.int32))
        third = await session.generate()
        assert third.prompt_ids.tolist() == session.ids[:-4].tolist()


async def test_what_is_observed_during_a_turn_comes_behind_it(client: sglrl.Client) -> None:
    async with client.session(input_ids=[4, 5], max_new_tokens=4) as session:
        session.observe([6])
        turn = asyncio.create_task(session.generate())
        await asyncio.sleep(0)
        session.observe([7])
        # The first observation is already part of the prompt.
        session.unobserve()
        session.observe([8])
        first = await turn
        second = await session.generate()
    assert first.prompt_ids.tolist() == [4, 5, 6]
    assert second.prompt_ids.tolist() == [4, 5, 6, *first.output_ids.tolist(), 8]


async def test_observations_during_encoding_come_after_the_turn(
    client: sglrl.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = client.session(input_ids=[1, 2], max_new_tokens=2)
    begun, encoded = asyncio.Event(), asyncio.Event()

    async def slow_ids(messages: object) -> bytes:
        begun.set()
        await encoded.wait()
        return np.array([1, 2], "<i4").tobytes()

    monkeypatch.setattr(session.spec, "ids", slow_ids)
    session.observe([3])
    turn = asyncio.ensure_future(session.generate())
    await begun.wait()
    session.observe([4])
    session.unobserve()
    session.observe([5])
    encoded.set()
    assert (await turn).prompt_ids.tolist() == [1, 2, 3]
    assert (await session.generate()).prompt_ids.tolist() == [1, 2, 3, 1, 2, 5]


async def test_a_closed_session_gives_its_turn_up(client: sglrl.Client) -> None:
    session = client.session(input_ids=[4, 5], max_new_tokens=200)
    turn = asyncio.create_task(session.generate())
    # The turn is sent in the task's first step.
    await asyncio.sleep(0)
    assert any(worker.load for worker in client.workers)
    session.close()
    with pytest.raises(sglrl.Closed, match="the session was closed"):
        await turn
    while any(worker.load for worker in client.workers):
        await client.stats()


async def test_one_name_of_a_value_overrides_another(client: sglrl.Client) -> None:
    async with client.session(input_ids=[1, 2], max_tokens=50) as session:
        turn = await session.generate(max_new_tokens=3)
        assert len(turn.output_ids) == 3
        turn = await session.generate(max_completion_tokens=4)
        assert len(turn.output_ids) == 4
        with pytest.raises(sglrl.InvalidRequest, match="another name"):
            await session.generate(max_tokens=1, max_new_tokens=1)

    async def agent(session: sglrl.Session, item: Any) -> float:
        turn = await session.generate(max_new_tokens=3, sampling_seed=5)
        assert len(turn.output_ids) == 3
        return 1.0

    def opening(item: Any) -> dict[str, Any]:
        return {"input_ids": item["input_ids"], "max_completion_tokens": 9}

    run = sglrl.rollout(
        client, agent, ITEMS[:2], max_tokens=50, seed=1, open_session=opening, on_error="raise"
    )
    assert len([group async for group in run]) == 2


async def test_sessions_always_record_logprobs(client: sglrl.Client) -> None:
    async def agent(session: sglrl.Session, item: Any) -> float:
        turn = await session.generate(max_new_tokens=2, logprobs=True)
        assert turn.logprobs is not None
        return 1.0

    async with client.session(input_ids=[5], logprobs=True) as session:  # type: ignore[call-arg]
        turn = await session.generate(max_new_tokens=2, logprobs=True)  # type: ignore[call-arg]
        assert turn.logprobs is not None
        for wrong in (False, 3):
            says = f"logprobs={wrong}: a session always records logprobs.*client.generate"
            with pytest.raises(sglrl.InvalidRequest, match=says):
                await session.generate(max_new_tokens=2, logprobs=wrong)  # type: ignore[call-arg]
    with pytest.raises(sglrl.InvalidRequest, match="always records"):
        client.session(input_ids=[5], logprobs=False)  # type: ignore[call-arg]
    values: Any = {"logprobs": True}
    assert len([g async for g in sglrl.rollout(client, agent, ITEMS[:2], **values)]) == 2
    with pytest.raises(sglrl.InvalidRequest, match="always records"):
        sglrl.rollout(client, agent, ITEMS, **{**values, "logprobs": False})
