"""Agents over a data set, on the fake engine: which groups are returned, and which are not."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import signal
import weakref
from collections.abc import AsyncIterator, Iterator
from fractions import Fraction
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest

import sglrl
from sglrl.rollouts import delivery

ITEMS = [{"input_ids": [1 + i % 900, 2, 3], "id": i} for i in range(40)]


@pytest.fixture
async def client() -> AsyncIterator[sglrl.Client]:
    async with sglrl.launch(
        "fake", engine="fake", replicas=2, tokens_per_step=4, vocab_size=1000, context_length=256
    ) as client:
        yield client


async def of_now(session: sglrl.Session, item: dict[str, Any]) -> sglrl.Trajectory:
    """Run ``two_turns``, and give the tokens the weights' version, as a real engine does."""
    client = session._spec.client
    version = client.weight_version
    reward = await two_turns(session, item)
    made = session.trajectory(reward)
    return made.replace(versions=np.where(made.loss_mask, version, -1))


def new_weights(client: sglrl.Client) -> None:
    """Do what the weight channel does after an update; the fake engine has no weights."""
    weights = client._pool.weights
    weights.version += 1
    for listener in weights.on_version:
        listener()


async def two_turns(session: sglrl.Session, item: dict[str, Any]) -> float:
    first = await session.generate(max_new_tokens=6)
    assert first.output_ids.tolist() == (item["input_ids"] * 2)[:6]
    session.observe([7, 8])
    second = await session.generate(max_new_tokens=3)
    assert second.prompt_ids.tolist() == [*item["input_ids"], *first.output_ids.tolist(), 7, 8]
    return float(item["id"])


# --- sessions -------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("seconds", [np.float32(60), np.int64(60), Fraction(60)], ids=type)
async def test_seconds_of_any_number(seconds: Any) -> None:
    async with sglrl.launch("fake", engine="fake", timeout=seconds) as client:
        for session in (
            client.session(input_ids=[1], max_new_tokens=2),
            client.session(input_ids=[1], max_new_tokens=2, timeout=seconds),
        ):
            await session.generate()
        run = sglrl.rollout(client, two_turns, ITEMS[:4], timeout=seconds)
        async with run:
            await run.pause()
            asyncio.get_running_loop().call_later(0.05, run.resume)
            assert len(await run.take(4)) == 4
        away = sglrl.rollout(client, two_turns, ITEMS[:4], timeout=seconds, processes=1)
        assert len([group async for group in away]) == 4


@pytest.mark.parametrize("kind", [list, tuple, np.array])
async def test_tokenizers_that_give_no_lists(client: sglrl.Client, kind: Any) -> None:
    class Tokenizer:
        all_special_tokens: ClassVar[list[str]] = []

        def __len__(self) -> int:
            return 1000

        def __call__(self, texts: list[str], **options: Any) -> dict[str, Any]:
            return {"input_ids": [kind([*text.encode()]) for text in texts]}

    client._tokenizer_box._tokenizer = Tokenizer()
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


# --- whole runs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("concurrency", [None, 1, 7, 500])
async def test_every_item_gives_one_group(client: sglrl.Client, concurrency: int | None) -> None:
    seen = []
    run = sglrl.rollout(client, two_turns, ITEMS, group_size=3, concurrency=concurrency)
    async for group in run:
        seen.append(group.index)
        assert group.item is ITEMS[group.index]
        assert group.rewards.tolist() == [group.index] * 3
        assert group.failed == 0
        assert group.tokens == 27
        assert [t.metadata for t in group.trajectories] == [
            {"item": group.index, "sample": i} for i in range(3)
        ]
    assert sorted(seen) == list(range(40))
    metrics = run.metrics
    assert (metrics.groups_taken, metrics.samples_done, metrics.turns) == (40, 120, 240)
    assert metrics.generated_tokens == 120 * 9
    assert metrics.samples_running == metrics.groups_running == 0
    if concurrency is not None:
        assert metrics.concurrency == concurrency


async def test_items_of_every_kind(client: sglrl.Client) -> None:
    async def agent(session: sglrl.Session, item: Any) -> sglrl.Trajectory | None:
        turn = await session.generate(max_new_tokens=1)
        session.reward(float(turn.output_ids[0]))
        return session.trajectory() if item == 5 else None

    async def items() -> AsyncIterator[int]:
        for i in (4, 5, 6):
            yield i

    run = sglrl.rollout(client, agent, items(), open_session=lambda i: {"input_ids": [i]})
    assert sorted([g.rewards.tolist() async for g in run]) == [[4.0], [5.0], [6.0]]
    with pytest.raises(sglrl.UsageError, match="cannot tell what a session begins with"):
        async for _ in sglrl.rollout(client, agent, [object()], on_error="raise"):
            pass
    with pytest.raises(sglrl.UsageError, match="dataset must be an iterable"):
        sglrl.rollout(client, agent, "a text")
    for wrong in ({"group_size": 0}, {"max_staleness": 1}, {"on_error": "ignore"}, {"timeout": 0}):
        with pytest.raises(sglrl.UsageError):
            sglrl.rollout(client, agent, [], **wrong)
    assert [g async for g in sglrl.rollout(client, agent, [])] == []


async def test_groups_come_as_they_finish_not_as_they_began(client: sglrl.Client) -> None:
    held = asyncio.Event()

    async def agent(session: sglrl.Session, item: dict[str, Any]) -> float:
        if item["id"] == 0:
            await held.wait()
        return await two_turns(session, item)

    async with sglrl.rollout(client, agent, ITEMS, concurrency=4) as run:
        others = await run.take(39)
        assert 0 not in {g.index for g in others}
        held.set()
        assert [g.index for g in await run.take(5)] == [0]
        assert await run.take(5) == []


async def test_leaving_early_leaves_nothing(client: sglrl.Client) -> None:
    """The fixtures check that no task remains; this test checks that no call remains."""
    async with sglrl.rollout(client, two_turns, ITEMS, group_size=4) as run:
        await run.take(1)
    async with asyncio.timeout(60):
        # The workers confirm that the calls have stopped.
        while client._driver.fabric.calls:
            await client._driver.idle()
    assert await run.take(1) == []
    with pytest.raises(sglrl.UsageError, match="begun once"):
        await run.__aenter__()


async def test_nothing_is_lost_when_taking_is_given_up(client: sglrl.Client) -> None:
    held = asyncio.Event()

    async def agent(session: sglrl.Session, item: dict[str, Any]) -> float:
        if item["id"] >= 3:
            await held.wait()
        return await two_turns(session, item)

    async with sglrl.rollout(client, agent, ITEMS[:5], concurrency=5) as run:
        with pytest.raises(sglrl.DeadlineExceeded, match="of 5 groups"):
            await run.take(5, timeout=0.2)
        for timeout in (-1, float("nan")):
            with pytest.raises(sglrl.UsageError, match="timeout must be"):
                await run.take(5, timeout=timeout)
            with pytest.raises(sglrl.UsageError, match="timeout must be"):
                await run.pause(timeout=timeout)
        held.set()
        assert sorted(g.index for g in await run.take(5)) == [0, 1, 2, 3, 4]


# --- failures -------------------------------------------------------------------------------------


class Flaky:
    """An agent that fails the first ``times`` tries of each sample of the given items."""

    def __init__(self, items: set[int], times: int) -> None:
        self.items = items
        self.times = times
        self.tries: dict[tuple[int, int], int] = {}

    async def __call__(self, session: sglrl.Session, item: dict[str, Any]) -> float:
        key = (item["id"], session.metadata["sample"])
        self.tries[key] = self.tries.get(key, 0) + 1
        if item["id"] in self.items and self.tries[key] <= self.times:
            await session.generate(max_new_tokens=1)
            raise RuntimeError("the environment broke")
        return await two_turns(session, item)


async def test_failed_samples_are_run_again(client: sglrl.Client) -> None:
    agent = Flaky({3, 17}, times=2)
    run = sglrl.rollout(client, agent, ITEMS, group_size=2, retries=2)
    groups = [g async for g in run]
    assert sorted(g.index for g in groups) == list(range(40))
    assert all(len(g.trajectories) == 2 for g in groups)
    assert run.metrics.samples_retried == 8
    assert run.metrics.samples_lost == {}
    assert len(run.errors) == 8


async def test_what_fails_again_and_again_is_dropped(client: sglrl.Client) -> None:
    agent = Flaky({3}, times=99)
    run = sglrl.rollout(client, agent, ITEMS, group_size=2, retries=1, on_error="retry")
    groups = [g async for g in run]
    assert sorted({*range(40)} - {g.index for g in groups}) == [3]
    metrics = run.metrics
    assert metrics.groups_dropped == 1
    # One sample fails for good, and its group is dropped with the other sample. The group is not
    # begun again, because the failed sample has no try left.
    assert metrics.samples_lost == {"error": 1, "given up": 1}
    assert metrics.samples_done == 78


async def test_a_smaller_group_may_be_enough(client: sglrl.Client) -> None:
    async def agent(session: sglrl.Session, item: dict[str, Any]) -> float:
        if session.metadata["sample"] == 1:
            raise RuntimeError("the environment broke")
        return await two_turns(session, item)

    run = sglrl.rollout(client, agent, ITEMS, group_size=3, min_group=2, on_error="drop")
    groups = [g async for g in run]
    assert [(len(g.trajectories), g.failed) for g in groups] == [(2, 1)] * 40
    assert run.metrics.samples_lost == {"error": 40}
    assert run.metrics.samples_retried == 0


async def test_an_error_may_end_the_run(client: sglrl.Client) -> None:
    agent = Flaky({5}, times=1)
    with pytest.raises(RuntimeError, match="the environment broke"):
        async for _ in sglrl.rollout(client, agent, ITEMS, on_error="raise", concurrency=3):
            pass


async def test_an_agent_that_never_works_is_not_run_over_all_data(client: sglrl.Client) -> None:
    async def agent(session: sglrl.Session, item: dict[str, Any]) -> Any:
        await session.generate(max_new_tokens=1)
        return "a text"

    endless = (ITEMS[i % 40] for i in range(10**9))
    with pytest.raises(sglrl.UsageError, match="must return its reward") as caught:
        async for _ in sglrl.rollout(client, agent, endless):
            pass
    assert "none of the first 32 samples" in "".join(caught.value.__notes__)


async def test_stragglers_are_cancelled_and_counted(client: sglrl.Client) -> None:
    cancelled = []

    async def agent(session: sglrl.Session, item: dict[str, Any]) -> float:
        if item["id"] == 7 and session.metadata["sample"] == 2:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append(item["id"])
                raise
        return await two_turns(session, item)

    run = sglrl.rollout(client, agent, ITEMS, group_size=3, timeout=0.5)
    groups = {g.index: g async for g in run}
    assert cancelled == [7]
    assert len(groups) == 40
    assert (len(groups[7].trajectories), groups[7].failed) == (2, 1)
    assert run.metrics.samples_lost == {"timeout": 1}


async def test_a_timeout_of_a_tool_is_an_error_like_others(client: sglrl.Client) -> None:
    async def agent(session: sglrl.Session, item: dict[str, Any]) -> float:
        if item["id"] == 7 and not session.metadata.get("again"):
            raise TimeoutError("the tool is slow")
        return await two_turns(session, item)

    run = sglrl.rollout(client, agent, ITEMS, timeout=100, on_error="drop")
    assert len([g async for g in run]) == 39
    assert run.metrics.samples_lost == {"error": 1}, "at once, and with its group"


@pytest.mark.parametrize("how", ["a task it awaits", "its own task"])
async def test_an_agent_that_is_cancelled_from_within_has_failed(
    client: sglrl.Client, how: str
) -> None:
    async def agent(session: sglrl.Session, item: dict[str, Any]) -> float:
        reward = await two_turns(session, item)
        if item["id"] == 3 and not run.metrics.samples_retried:
            if how == "its own task":
                asyncio.current_task().cancel()  # type: ignore[union-attr]
                await asyncio.sleep(0)
            lookup = asyncio.create_task(asyncio.Event().wait())
            lookup.cancel()
            await lookup
        return reward

    run = sglrl.rollout(client, agent, ITEMS, concurrency=4)
    assert len([g async for g in run]) == len(ITEMS)
    assert run.metrics.samples_retried == 1
    assert "cancelled by something that it awaited" in str(run.errors[0])


async def test_an_agent_that_would_leave_the_program_has_failed(client: sglrl.Client) -> None:
    async def agent(session: sglrl.Session, item: dict[str, Any]) -> float:
        if item["id"] == 3:
            raise SystemExit(2)
        return await two_turns(session, item)

    run = sglrl.rollout(client, agent, ITEMS, on_error="drop")
    assert len([g async for g in run]) == len(ITEMS) - 1
    assert "leave the program, with 2" in str(run.errors[0])


async def test_who_ends_after_the_timeout_is_too_late(client: sglrl.Client) -> None:
    async def agent(session: sglrl.Session, item: dict[str, Any]) -> float:
        reward = await two_turns(session, item)
        if item["id"] == 3:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
        return reward

    run = sglrl.rollout(client, agent, ITEMS, timeout=0.5, retries=0)
    assert len([g async for g in run]) == len(ITEMS) - 1
    assert run.metrics.samples_lost == {"timeout": 1}


async def test_a_short_data_set_of_which_nothing_works(client: sglrl.Client) -> None:
    async def agent(session: sglrl.Session, item: dict[str, Any]) -> float:
        raise RuntimeError("the environment broke")

    with pytest.raises(RuntimeError, match="the environment broke") as caught:
        async for _ in sglrl.rollout(client, agent, ITEMS[:3], retries=0):
            pass
    assert "none of the 3 samples" in "".join(caught.value.__notes__)


# --- data sets ------------------------------------------------------------------------------------


async def test_what_fails_is_run_again_while_the_next_item_is_awaited(
    client: sglrl.Client,
) -> None:
    """The next item arrives only after the last result."""
    come = asyncio.Event()

    async def items() -> AsyncIterator[dict[str, Any]]:
        for item in ITEMS[:3]:
            yield item
            await come.wait()
            come.clear()

    agent = Flaky({0, 1, 2}, times=2)
    async with sglrl.rollout(client, agent, items(), group_size=2) as run:
        for index in range(3):
            (group,) = await run.take(1, timeout=30)
            assert group.index == index
            come.set()
        assert await run.take(1, timeout=30) == []
    assert run.metrics.samples_retried == 12


@pytest.mark.parametrize("kind", ["plain", "async"])
async def test_a_data_set_that_breaks_off(client: sglrl.Client, kind: str) -> None:
    """Items that were read before the error are still returned."""

    def plain() -> Iterator[dict[str, Any]]:
        yield from ITEMS[:5]
        raise OSError("the disk is gone")

    async def in_time() -> AsyncIterator[dict[str, Any]]:
        for item in plain():
            yield item

    taken = []
    with pytest.raises(OSError, match="the disk is gone"):
        async for group in sglrl.rollout(
            client, two_turns, plain() if kind == "plain" else in_time(), concurrency=2
        ):
            taken.append(group.index)
    assert sorted(taken) == [0, 1, 2, 3, 4]


async def test_data_sets_as_torch_has_them(client: sglrl.Client) -> None:
    class Mapped:
        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> dict[str, Any]:
            return dict(ITEMS)[index] if index > 5 else ITEMS[index]  # type: ignore[arg-type]

    class Endless:
        def __len__(self) -> int:
            raise TypeError("it has no length")

        def __iter__(self) -> Iterator[dict[str, Any]]:
            return iter(ITEMS[:6])

    for dataset in (Mapped(), Endless()):
        groups = [g async for g in sglrl.rollout(client, two_turns, dataset)]  # type: ignore[arg-type]
        assert sorted(g.index for g in groups) == [*range(6)]


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("kind", ["plain", "async"])
async def test_the_end_is_seen_without_new_weights(
    client: sglrl.Client, staleness: int, kind: str
) -> None:
    """The run notices the end of the data set, although no further group may begin."""

    async def in_time() -> AsyncIterator[dict[str, Any]]:
        for item in ITEMS[:8]:
            await asyncio.sleep(0)
            yield item

    dataset = ITEMS[:8] if kind == "plain" else in_time()
    async with sglrl.rollout(
        client, of_now, dataset, batch_size=8 // (staleness + 1), max_staleness=staleness
    ) as run:
        groups = []
        async with asyncio.timeout(30):
            async for group in run:
                groups.append(group.index)
    assert sorted(groups) == [*range(8)]


async def test_a_run_is_looped_over_once(client: sglrl.Client) -> None:
    run = sglrl.rollout(client, two_turns, ITEMS)
    before = asyncio.all_tasks()
    async for _ in run:
        break
    with pytest.raises(sglrl.UsageError, match="has ended"):
        async for _ in run:
            pass
    # After a break, Python closes the generator in another task.
    _, left = await asyncio.wait(asyncio.all_tasks() - before, timeout=60)
    assert not left


async def never(group: sglrl.Group) -> bool:
    return False


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"keep": never}, "keep must be a plain function"),
        ({"keep": 3}, "keep must be callable"),
        ({"agent": None}, "agent must be callable"),
        ({"seed": "x"}, "seed must be an integer"),
        ({"seed": 1.5}, "seed must be an integer"),
        ({"timeout": "x"}, "timeout must be"),
    ],
)
async def test_arguments_that_no_run_can_have(
    client: sglrl.Client, wrong: dict[str, Any], says: str
) -> None:
    with pytest.raises(sglrl.UsageError, match=says):
        sglrl.rollout(client, **{"agent": two_turns, "dataset": ITEMS, **wrong})


async def test_an_agent_that_is_not_async_ends_the_run(client: sglrl.Client) -> None:
    calls = []

    def agent(session: sglrl.Session, item: Any) -> float:
        calls.append(item)
        return 1.0

    with pytest.raises(sglrl.UsageError, match=r"the agent must be async: it returned 1\.0"):
        async for _ in sglrl.rollout(client, agent, ITEMS):  # type: ignore[arg-type]
            pass
    # The run retried none of the samples that began together.
    assert len(calls) == len({item["id"] for item in calls})


async def test_groups_without_a_signal_are_replaced(client: sglrl.Client) -> None:
    run = sglrl.rollout(
        client, two_turns, ITEMS, batch_size=5, keep=lambda group: group.index % 2 == 0
    )
    async with run:
        batches = [[g.index for g in batch] async for batch in run.batches()]
    assert [len(b) for b in batches] == [5, 5, 5, 5]
    assert sorted(i for batch in batches for i in batch) == list(range(0, 40, 2))
    assert run.metrics.groups_filtered == 20


async def test_a_lost_worker_costs_no_sample(client: sglrl.Client) -> None:
    async with sglrl.rollout(client, two_turns, ITEMS * 20, group_size=2) as run:
        await run.take(10)
        os.kill(client.workers[0].pid, signal.SIGKILL)
        groups = await run.take(790)
    assert len(groups) == 790
    assert all(len(g.trajectories) == 2 for g in groups)
    assert run.metrics.samples_lost == {}


class Bomb(sglrl.Actor):
    """A tool whose process exits at number 13."""

    @sglrl.endpoint
    async def use(self, number: int) -> int:
        if number == 13:
            os._exit(1)
        return number + 1


async def test_a_tool_that_crashes_harms_its_own_trajectory_only(client: sglrl.Client) -> None:
    async with sglrl.spawn(Bomb, replicas=3, window=1, restarts=100) as tool:

        async def agent(session: sglrl.Session, item: dict[str, Any]) -> float:
            await session.generate(max_new_tokens=4)
            session.observe([await tool.use(item["id"])])
            await session.generate(max_new_tokens=2)
            return float(session.ids[-3])

        run = sglrl.rollout(client, agent, ITEMS, group_size=2, on_error="drop", retries=0)
        groups = {g.index: g async for g in run}
    assert sorted({*range(40)} - set(groups)) == [13]
    assert all(g.rewards.tolist() == [g.index + 1] * 2 for g in groups.values())
    assert {type(error) for error in run.errors} <= {sglrl.WorkerLost}


# --- staleness ------------------------------------------------------------------------------------


@pytest.mark.parametrize("staleness", [0, 1, 2])
async def test_rollouts_run_ahead_by_so_many_versions(client: sglrl.Client, staleness: int) -> None:
    begun: list[int] = []

    async def agent(session: sglrl.Session, item: dict[str, Any]) -> sglrl.Trajectory:
        begun.append(item["id"])
        return await of_now(session, item)

    async with sglrl.rollout(
        client, agent, ITEMS, batch_size=4, max_staleness=staleness, concurrency=40
    ) as run:
        for step in range(4):
            batch = await run.take(4)
            assert len(batch) == 4
            # While the trainer works, the run begins no more samples than this.
            while run.metrics.groups_ready < 4 * staleness or run.metrics.samples_running:
                await client.generate(input_ids=[1], max_new_tokens=1)
            assert len(begun) == (step + staleness + 1) * 4
            new_weights(client)


async def test_tokens_that_are_too_old_are_not_handed_out(client: sglrl.Client) -> None:
    sampled, held = asyncio.Event(), asyncio.Event()
    tries: dict[int, int] = {}

    async def agent(session: sglrl.Session, item: dict[str, Any]) -> sglrl.Trajectory:
        tries[item["id"]] = tries.get(item["id"], 0) + 1
        made = await of_now(session, item)
        if item["id"] == 0 and tries[0] == 1:
            sampled.set()
            await held.wait()
        return made

    async with sglrl.rollout(
        client, agent, ITEMS, batch_size=2, max_staleness=0, concurrency=8
    ) as run:
        await sampled.wait()
        with pytest.raises(sglrl.DeadlineExceeded):
            await run.take(2, timeout=0.1)
        # Group 1 is ready, and group 0 holds tokens of version 0. Neither is usable after the
        # update.
        new_weights(client)
        batch = await run.take(2)
        assert not held.is_set(), "the straggler was cancelled, not awaited"
        assert run.metrics.samples_lost == {"stale": 2}
        assert all(g.staleness == 0 for g in batch)
        assert len(batch) == 2
        # Their items are run again.
        rest = await run.take(2)
        assert {0, 1} <= {g.index for g in (*batch, *rest)}
        assert (tries[0], tries[1]) == (2, 2)


# --- pause and resume -----------------------------------------------------------------------------


async def test_a_paused_run_samples_nothing(client: sglrl.Client) -> None:
    async with sglrl.rollout(client, two_turns, ITEMS * 50, group_size=2) as run:
        await run.take(5)
        await run.pause(timeout=60)
        turns = run.metrics.turns
        assert not any(w.load for w in client.workers)
        await client.generate(input_ids=[1], max_new_tokens=50)
        assert run.metrics.turns == turns
        run.resume()
        await run.take(20)
        assert run.metrics.turns > turns
        await run.pause(timeout=60)
        # Closing a paused run cancels the agents that wait for their turn.


async def test_a_pause_is_not_counted_against_the_timeout(client: sglrl.Client) -> None:
    run = sglrl.rollout(client, two_turns, ITEMS[:4], timeout=0.5, retries=0)
    async with run:
        await run.pause(timeout=30)
        await asyncio.sleep(0.7)
        run.resume()
        groups = await run.take(4, timeout=30)
    assert len(groups) == 4
    assert run.metrics.samples_lost == {}


async def test_a_run_that_was_stopped_goes_on_where_it_was(client: sglrl.Client) -> None:
    async with sglrl.rollout(client, two_turns, iter(ITEMS), concurrency=5) as run:
        seen = [g.index for g in await run.take(11)]
        state = run.state_dict()
    assert state["next"] >= 11
    assert not set(state["unfinished"]) & set(seen)
    async with sglrl.rollout(client, two_turns, iter(ITEMS), state=state, concurrency=3) as run:
        more = [g.index for g in await run.take(9)]
        state = run.state_dict()
    rest = [g.index async for g in sglrl.rollout(client, two_turns, iter(ITEMS), state=state)]
    assert sorted(seen + more + rest) == list(range(40))
    with pytest.raises(sglrl.UsageError, match="state_dict"):
        sglrl.rollout(client, two_turns, ITEMS, state={"next": 3})


# --- concurrency ----------------------------------------------------------------------------------


async def test_the_limit_grows_to_what_the_engines_take() -> None:
    most = 0
    running = 0

    async def agent(session: sglrl.Session, item: Any) -> float:
        nonlocal most, running
        running += 1
        most = max(most, running)
        for _ in range(5):
            await session.generate(max_new_tokens=20)
        running -= 1
        return 1.0

    async with sglrl.launch(
        "fake", engine="fake", tokens_per_step=1, step_seconds=0.002, context_length=1000
    ) as client:
        items = [{"input_ids": [1]} for _ in range(5000)]
        async with sglrl.rollout(client, agent, items) as run:
            first = run.metrics.concurrency
            while run.metrics.concurrency < 64 * first:
                await run.take(10)
            assert most > 32 * first


async def test_the_limit_grows_while_turns_are_long() -> None:
    """The engines report their load during a turn, not only at its end."""

    async def agent(session: sglrl.Session, item: dict[str, Any]) -> float:
        await session.generate(max_new_tokens=5000)
        return 1.0

    async with sglrl.launch(
        "fake",
        engine="fake",
        vocab_size=1000,
        context_length=10_000,
        tokens_per_step=1,
        step_seconds=0.02,
        max_running_requests=256,
    ) as client:
        endless = (ITEMS[i % 40] for i in range(10**9))
        async with sglrl.rollout(client, agent, endless) as run, asyncio.timeout(60):
            while run.metrics.samples_running < 128:
                await client.stats()
            assert run.metrics.turns == 0


async def test_what_is_given_up_before_its_first_step_is_counted(client: sglrl.Client) -> None:
    """A sample fails, and drops a group whose other sample was started in the same tick."""

    async def agent(session: sglrl.Session, item: dict[str, Any]) -> float:
        if session.metadata["sample"] == 0 and item["id"] < 10:
            raise RuntimeError("at once")
        return await two_turns(session, item)

    run = sglrl.rollout(
        client, agent, ITEMS, group_size=2, concurrency=2, retries=0, on_error="drop"
    )
    assert len([g async for g in run]) == 30
    assert run.metrics.samples_lost == {"error": 10, "given up": 10}
    assert run.metrics.samples_running == 0


def test_blocking() -> None:
    with sglrl.blocking("fake", engine="fake", vocab_size=1000) as client:
        with client.session(input_ids=[4, 5], max_new_tokens=3) as session:
            assert session.generate().output_ids.tolist() == [4, 5, 4]
            session.observe([9])
            session.reward(0.5)
            session.generate()
            assert session.trajectory(1.0).rewards.tolist() == [0.5, 1.0]
            assert session.ids.tolist() == [4, 5, 4, 5, 4, 9, 4, 5, 4]
        with pytest.raises(sglrl.Closed):
            session.generate()
        run = client.rollout(two_turns, ITEMS, group_size=2)
        assert sorted(g.index for g in run) == list(range(40))
        assert run.metrics.samples_done == 80
        with client.rollout(two_turns, ITEMS, batch_size=5) as run:
            run.take(5)
            run.pause(timeout=60)
            state = run.state_dict()
            run.resume()
            assert [len(batch) for batch in run.batches()] == [5] * 7
        assert state["next"] >= 5


def test_a_blocking_run_is_looped_over_once() -> None:
    with sglrl.blocking("fake", engine="fake", vocab_size=1000) as client:
        left = client.rollout(two_turns, ITEMS)
        for _ in left:
            break
        whole = client.rollout(two_turns, ITEMS)
        assert len(list(whole)) == len(ITEMS)
        for run in (left, whole):
            with pytest.raises(sglrl.UsageError, match="has ended"):
                list(run)


def test_the_blocking_forms_have_what_the_others_have() -> None:
    for blocking, other in (
        (sglrl.BlockingSession, sglrl.Session),
        (sglrl.BlockingRollout, sglrl.Rollout),
    ):
        public = {name for name in vars(other) if not name.startswith("_")}
        internal = {"oldest_version", "concurrency", "refused", "rewarded"}
        assert public - internal <= set(dir(blocking))


async def test_progress_is_logged_where_there_is_no_terminal(
    client: sglrl.Client, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "sglrl.rollout")
    async for _ in sglrl.rollout(client, two_turns, ITEMS, progress=True):
        pass
    assert "reward 19.5" in caplog.messages[-1]
    caplog.clear()
    async for _ in sglrl.rollout(client, two_turns, ITEMS, progress=False):
        pass
    assert not caplog.messages


async def test_who_waits_for_new_weights_is_told(
    client: sglrl.Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(delivery, "_HINT_SECONDS", 0.05)

    run = sglrl.rollout(client, of_now, ITEMS, batch_size=2, max_staleness=0)
    async with run:
        await run.take(2)
        assert "waits for new weights" not in caplog.text
        with pytest.raises(sglrl.DeadlineExceeded):
            await run.take(2, timeout=2.0)
        assert caplog.text.count("waits for new weights") == 1
        new_weights(client)
        assert len(await run.take(2)) == 2


async def test_who_waits_while_nobody_has_the_weights_is_told(
    client: sglrl.Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(delivery, "_HINT_SECONDS", 0.05)
    await client.pause()
    async with sglrl.rollout(client, two_turns, ITEMS[:1], concurrency=1) as run:
        with pytest.raises(sglrl.DeadlineExceeded):
            await run.take(timeout=0.2)
        assert "waits for new weights" not in caplog.text, "the worker serves"
        stale = [msgspec.structs.replace(client.workers[0], state="stale")]
        monkeypatch.setattr(sglrl.Client, "workers", stale)
        with pytest.raises(sglrl.DeadlineExceeded):
            await run.take(timeout=0.2)
        assert "(1) the weights of version 0" in caplog.text
        monkeypatch.undo()
        await client.resume()
        assert len(await run.take()) == 1
