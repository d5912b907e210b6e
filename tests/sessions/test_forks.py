"""Sessions that fork: several conversations with one history, sampled at the same time."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

import sglrl
from sglrl.sessions.session import Session

from .test_branches import in_the_loss, sampled

pytestmark = pytest.mark.asyncio(loop_scope="module")
PROMPT = [5, 6, 7]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client() -> AsyncIterator[sglrl.Client]:
    async with sglrl.launch("tiny", engine="fake", step_seconds=0.001, tokens_per_step=1) as client:
        yield client


@pytest.mark.parametrize("seed", range(30))
async def test_each_token_is_in_the_loss_once(client: sglrl.Client, seed: int) -> None:
    chance = random.Random(seed)
    expected: list[Any] = []
    paths: dict[Session, list[int]] = {}
    """For each session all tokens of its conversation, by a simple model."""

    async def act(session: Session) -> None:
        for _ in range(chance.randint(1, 4)):
            observed = chance.choices(range(3, 500), k=chance.randint(0, 3))
            if observed and session.turns:
                session.observe(observed)
                paths[session] = paths[session] + observed
            turn = await session.generate(max_new_tokens=chance.randint(1, 6))
            assert turn.prompt_ids.tolist() == paths[session]
            paths[session] = paths[session] + turn.output_ids.tolist()
            expected.append(sampled(turn))
            session.reward(1)

    async with client.session(input_ids=PROMPT, seed=seed) as session:
        paths[session] = PROMPT
        for _ in range(3):
            await asyncio.gather(*map(act, paths))
            for one in list(paths):
                if chance.random() < 0.5:
                    paths[one.fork()] = paths[one]
        leaves = session.trajectories()
        assert all(one.ids.tolist() == path for one, path in paths.items())
    found = [turn for leaf in leaves for turn in in_the_loss(leaf)]
    assert Counter(found) == Counter(expected)
    assert sum(leaf.reward for leaf in leaves) == len(expected)
    (seconds,) = {leaf.timing.generating for leaf in leaves}
    assert 0 < seconds <= leaves[0].timing.total


async def test_a_fork_goes_on_from_the_same_place(client: sglrl.Client) -> None:
    async with client.session(messages=[{"role": "user", "content": "Hi"}]) as session:
        await session.generate(max_new_tokens=3)
        session.observe("and")
        session.metadata["a"] = 1
        fork = session.fork()
        session.unobserve()
        first, second = await asyncio.gather(
            fork.generate(max_new_tokens=3), session.generate(max_new_tokens=3)
        )
        start = second.prompt_ids.tolist()
        assert first.prompt_ids.tolist()[: len(start)] == start
        assert len(first.prompt_ids) > len(start)
        assert fork.turns == session.turns
        assert fork.metadata == {"a": 1}
        fork.go_back()
        again = await fork.generate(max_new_tokens=2)
        assert again.prompt_ids.tolist() == first.prompt_ids.tolist()
        assert len(session.trajectories()) == len(fork.trajectories()) == 3
        turn = session.generate(max_new_tokens=3)
        assert turn.send(None) is not None
        with pytest.raises(sglrl.UsageError, match="await it before fork"):
            session.fork()
        turn.close()


async def test_seeds_of_forks_differ(client: sglrl.Client) -> None:
    found: list[set[int]] = [set(), set()]
    for seeds in found:

        async def agent(session: sglrl.Session, item: Any, seeds: set[int] = seeds) -> float:
            forks = [session, session.fork(), session.fork(), session.fork().fork()]
            for _ in range(2):
                turns = await asyncio.gather(*[fork.generate(max_new_tokens=2) for fork in forks])
                seeds.update(turn.params.seed or 0 for turn in turns)
            return 0.0

        items = [{"input_ids": PROMPT}, {"input_ids": PROMPT}]
        async with sglrl.rollout(client, agent, items, group_size=4, seed=3) as run:
            assert len([group async for group in run]) == 2
    assert len(found[0]) == 2 * 4 * 4 * 2
    assert found[0] == found[1]


async def test_closing(client: sglrl.Client) -> None:
    async with asyncio.timeout(300):
        async with client.session(input_ids=PROMPT) as session:
            forks = [session.fork() for _ in range(3)]
            begun = [asyncio.Event() for _ in range(4)]
            turns = [
                asyncio.ensure_future(
                    one.generate(
                        max_new_tokens=1000,
                        ignore_eos=True,
                        on_chunk=lambda chunk, event=event: event.set(),  # type: ignore[misc]
                    )
                )
                for one, event in zip([session, *forks], begun, strict=True)
            ]
            for event in begun:
                await event.wait()
            forks[0].close()
            with pytest.raises(sglrl.Closed):
                await turns[1]
            assert not any(turn.done() for turn in (turns[0], *turns[2:]))
        for turn in (turns[0], *turns[2:]):
            with pytest.raises(sglrl.Closed):
                await turn
        with pytest.raises(sglrl.Closed):
            await session.fork().generate()
