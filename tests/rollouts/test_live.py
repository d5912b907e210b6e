"""Watch samples while they run: ``Client.live_samples``, ``live_state`` and ``ended_samples``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

import sglrl
from sglrl.sessions.live import LiveSample, LiveState

from .agents import ITEMS


@pytest.fixture
async def watcher(client: sglrl.Client) -> AsyncIterator[sglrl.Client]:
    """Another client of the pool, as in another process."""
    async with sglrl.connect(client.address) as watcher:
        yield watcher


async def state_of(watcher: sglrl.Client, id_: str, turns: int = -1) -> LiveState:
    """Return the state when it has more turns than ``turns``."""
    async with asyncio.timeout(60):
        known, tokens = -1, -1
        while True:
            state = await watcher.live_state(id_, known, tokens)
            assert state is not None
            known, tokens = state.sample.turns, state.sample.tokens
            if known > turns:
                return state


async def test_a_session_is_shown_between_its_turns(
    client: sglrl.Client, watcher: sglrl.Client
) -> None:
    async with client.session(input_ids=[1, 2, 3], metadata={"item": "greeting"}) as session:
        (before,) = await watcher.live_samples()
        assert (before.id, before.item, before.doing) == (session.live_id, "greeting", "tools")
        await session.generate(max_new_tokens=5)
        session.observe([7, 8])
        await session.generate(max_new_tokens=3)
        session.reward(0.25)
        state = await state_of(watcher, session.live_id)
        assert (state.sample.turns, state.sample.tokens, state.sample.reward) == (2, 8, 0.25)
        expected = session.trajectory()
        assert state.trajectory is not None
        for name in ("prompt_ids", "response_ids", "loss_mask", "versions"):
            assert getattr(state.trajectory, name) == getattr(expected, name).tobytes()
        assert state.running == []
        # A caller that has these turns gets no trajectory again.
        again = await watcher.live_state(session.live_id, 2, 0)
        assert again is not None
        assert again.trajectory is None
    assert await watcher.live_samples() == []
    assert await watcher.live_state(session.live_id) is None


async def test_each_token_of_a_watched_turn_can_be_seen() -> None:
    # 30 steps of 20 ms, so that the states of the turn differ.
    async with (
        sglrl.launch("fake", engine="fake", tokens_per_step=1, step_seconds=0.02) as client,
        sglrl.connect(client.address) as watcher,
        client.session(input_ids=[1, 2, 3]) as session,
    ):
        await state_of(watcher, session.live_id)
        turn = asyncio.create_task(session.generate(max_new_tokens=30))
        seen: list[tuple[int, ...]] = []
        turns, tokens = 0, 0
        while turns == 0:
            state = await watcher.live_state(session.live_id, turns, tokens)
            assert state is not None
            turns, tokens = state.sample.turns, state.sample.tokens
            for running in state.running:
                assert state.sample.doing == "engine"
                assert len(running.logprobs) == len(running.versions) == len(running.ids)
                seen.append(tuple(np.frombuffer(running.ids, "<i4").tolist()))
        whole = tuple((await turn).output_ids.tolist())
    assert len(set(seen)) > 5
    assert all(whole[: len(part)] == part for part in seen)


async def test_ended_samples_and_their_errors(client: sglrl.Client, watcher: sglrl.Client) -> None:
    async def agent(session: sglrl.Session, item: dict[str, Any]) -> float:
        await session.generate(max_new_tokens=4)
        if item["i"] == 1:
            raise ValueError("the tool broke")
        return float(item["i"])

    items = [{"input_ids": [1 + i, 2], "i": i} for i in range(3)]
    first = await watcher.ended_samples(timeout=0)
    assert (first.samples, first.next) == ([], 0)
    run = sglrl.rollout(client, agent, items, group_size=2, on_error="drop")
    groups = {group.index: group async for group in run}
    ended = await watcher.ended_samples(first.next)
    found = {(one.item, one.sample): one for one in ended.samples}
    assert found.keys() == {(i, k) for i in range(3) for k in range(2)}
    assert "ValueError: the tool broke" in [one.error for one in ended.samples]
    for (item, sample), one in found.items():
        if item == 1:
            # The group is given up when its first sample fails.
            assert one.error in ("ValueError: the tool broke", "given up")
            if one.trajectory is None:
                # The other sample may be given up before its turn.
                assert one.error == "given up"
            else:
                assert one.trajectory.response_ids == np.int32([2, 2, 2, 2]).tobytes()
        else:
            assert one.error == ""
            assert one.trajectory is not None
            (known,) = [t for t in groups[item].trajectories if t.metadata["sample"] == sample]
            assert one.trajectory.response_ids == known.response_ids.tobytes()


async def test_samples_of_agent_processes(client: sglrl.Client, watcher: sglrl.Client) -> None:
    def make() -> Any:
        async def agent(session: sglrl.Session, item: dict[str, Any]) -> float:
            await session.generate(max_new_tokens=4)
            # The test ends the run while the agent waits here.
            await asyncio.sleep(600)
            return 0.0

        return agent

    run = sglrl.rollout(client, make(), ITEMS[:2], group_size=2, processes=2)
    async with run, asyncio.timeout(60):
        waiting = asyncio.create_task(run.take(1))
        samples: list[LiveSample] = []
        while len(samples) < 4 or min(one.turns for one in samples) < 1:
            samples = await watcher.live_samples()
            await asyncio.sleep(0.05)
        assert {(one.item, one.sample) for one in samples} == {(0, 0), (0, 1), (1, 0), (1, 1)}
        assert len({one.id.split("-")[0] for one in samples}) == 2
        for one in samples:
            state = await watcher.live_state(one.id)
            assert state is not None
            assert state.trajectory is not None
            assert state.trajectory.metadata["sample"] == one.sample
            assert state.trajectory.loss_mask == b"\1" * 4
        assert await watcher.live_state("1-1", timeout=1) is None
        waiting.cancel()
    assert client.observed.live == []
