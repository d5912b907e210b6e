"""One seed: each turn of each attempt of each sample has its own, and a later run has the same."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import numpy as np
import openai
import pytest
import pytest_asyncio

import sglrl
from sglrl.gateway.dialect import TurnRequest
from sglrl.gateway.stateless import StatelessTurn
from sglrl.inference.sampling import SentSampling
from sglrl.sessions.session_spec import SessionSpec

pytestmark = [pytest.mark.timeout(120), pytest.mark.asyncio(loop_scope="module")]

PROMPT = [5, 6, 7]
ITEMS = [{"input_ids": PROMPT}, {"input_ids": PROMPT}]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client() -> AsyncIterator[sglrl.Client]:
    async with sglrl.launch("tiny", engine="fake", replicas=2) as client:
        yield client


def opened(**values: Any) -> Any:
    return lambda item: {"input_ids": item["input_ids"], **values}


WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "rollout(seed=)": ({"seed": 7}, {}),
    "rollout(sampling=)": ({"sampling": sglrl.SamplingParams(seed=7)}, {}),
    "open_session, seed": ({"open_session": opened(seed=7)}, {}),
    "open_session, sampling": (
        {"open_session": opened(sampling=sglrl.SamplingParams(seed=7))},
        {},
    ),
    "generate(seed=)": ({}, {"seed": 7}),
    "generate(sampling_seed=)": ({"seed": 3}, {"sampling_seed": 7}),
    "run_tools(seed=)": ({}, {"seed": 7, "run_tools": True}),
}
"""The arguments of the run, and of each turn."""


async def seeds_of(
    client: sglrl.Client,
    run: dict[str, Any],
    turn: dict[str, Any],
    number: int,
    processes: int | None,
) -> list[list[int]]:
    """Return the sorted seeds of each sample.

    Args:
        number: how many samples run at a time, and the seed of the order in which turns begin.
    """
    values = {"max_new_tokens": 2, **turn}
    tools = values.pop("run_tools", False)

    async def agent(session: sglrl.Session, item: Any) -> float:
        chance = random.Random(f"{number}/{session.metadata}")

        async def sample(one: sglrl.Session) -> None:
            for _ in range(chance.randint(0, 5)):
                await asyncio.sleep(0)
            await (one.run_tools([], **values) if tools else one.generate(**values))

        await sample(session)
        session.go_back()
        await sample(session)
        forks = [session, session.fork(), session.fork()]
        await asyncio.gather(*map(sample, forks))
        # Forks of forks begin in any order.
        more = [fork.fork() for fork in chance.sample(forks, 3)]
        await asyncio.gather(*map(sample, chance.sample(more, 3)))
        session.metadata["seeds"] = sorted(made.params.seed or 0 for made in session.turns)
        return 0.0

    values_of_run = {"group_size": 3, "concurrency": number, "processes": processes, **run}
    found = sglrl.rollout(client, agent, ITEMS, **values_of_run)
    groups = sorted([group async for group in found], key=lambda group: group.index)
    return [trajectory.metadata["seeds"] for group in groups for trajectory in group.trajectories]


@pytest.mark.parametrize("way", WAYS)
async def test_each_turn_has_its_own(client: sglrl.Client, way: str) -> None:
    first = await seeds_of(client, *WAYS[way], number=5, processes=None)
    everything = [seed for sample in first for seed in sample]
    assert len(everything) == 2 * 3 * 8
    assert len(set(everything)) == len(everything)
    assert await seeds_of(client, *WAYS[way], number=2, processes=None) == first
    if way in ("rollout(seed=)", "open_session, sampling", "generate(seed=)"):
        assert await seeds_of(client, *WAYS[way], number=1, processes=2) == first


async def test_the_more_specific_seed_holds(client: sglrl.Client) -> None:
    async def agent(session: sglrl.Session, item: Any) -> float:
        given = {} if item["turn"] is None else {"seed": item["turn"]}
        turn = await session.generate(max_new_tokens=2, **given)
        session.metadata["seed"] = turn.params.seed
        return 0.0

    async def first(turn: int | None, **values: Any) -> int:
        items = [{"input_ids": PROMPT, "turn": turn}]
        (group,) = [group async for group in sglrl.rollout(client, agent, items, **values)]
        return int(group.trajectories[0].metadata["seed"])

    sampling = sglrl.SamplingParams(seed=1)
    assert await first(None, sampling=sampling) == 1
    assert await first(None, sampling=sampling, seed=2) == 2
    assert await first(None, sampling=sampling, seed=2, open_session=opened(seed=3)) == 3
    assert await first(4, sampling=sampling, seed=2, open_session=opened(seed=3)) == 4


async def test_a_session_by_itself(client: sglrl.Client) -> None:
    async def seeds(**values: Any) -> list[int | None]:
        async with client.session(input_ids=PROMPT, **values) as session:
            forks = [session.fork() for _ in range(4)]
            for fork in [session, *forks]:
                await fork.generate(max_new_tokens=2)
            return [turn.params.seed for turn in session.turns]

    found = await seeds(seed=7)
    assert found[0] == 7, "the first turn is that of a single call"
    assert len(set(found)) == 5
    assert await seeds(seed=7) == found
    assert await seeds(sampling=sglrl.SamplingParams(seed=7)) == found
    assert await seeds() == [None] * 5
    async with client.session(input_ids=PROMPT) as session:
        with pytest.raises(sglrl.InvalidRequest, match="seed must be at least 0, got -1"):
            await session.generate(seed=-1)
        with pytest.raises(sglrl.InvalidRequest, match="seed must be an integer, got 'x'"):
            await session.generate(seed="x")  # type: ignore[arg-type]


async def test_a_turn_that_failed_keeps_its_seed(client: sglrl.Client) -> None:
    async with client.session(input_ids=PROMPT, seed=7, timeout=30) as session:
        await session.generate(max_new_tokens=2)
        session.spec.options = session.spec.options.changed(timeout=0.0)
        with pytest.raises(sglrl.DeadlineExceeded):
            await session.generate(max_new_tokens=2)
        session.spec.options = session.spec.options.changed(timeout=30.0)
        await session.generate(max_new_tokens=2)
        first, second = (turn.params.seed for turn in session.turns)
    async with client.session(input_ids=PROMPT, seed=7) as session:
        await session.generate(max_new_tokens=2)
        await session.generate(max_new_tokens=2)
        assert [first, second] == [turn.params.seed for turn in session.turns]


@pytest.mark.parametrize("where", ["request", "rollout"])
async def test_agents_that_speak_http(client: sglrl.Client, where: str) -> None:
    """Equal requests, several choices and branches, which arrive in any order."""
    given: dict[str, Any] = {"seed": 7} if where == "request" else {}

    async def agent(session: sglrl.Session, item: Any) -> float:
        async with openai.AsyncOpenAI(
            base_url=session.base_url, api_key=session.api_key, max_retries=0
        ) as api:

            async def ask(text: str, **values: Any) -> Any:
                messages: list[Any] = [{"role": "user", "content": text}]
                return await api.chat.completions.create(
                    model="any", messages=messages, max_tokens=2, **given, **values
                )

            asks: list[Any] = [("a", 3), ("a", 1), ("b", 2), ("c", 1), ("d", 1), ("d", 1)]
            random.Random(item["order"]).shuffle(asks)
            await asyncio.gather(*[ask(text, n=n) for text, n in asks])
        session.metadata["seeds"] = sorted(turn.params.seed or 0 for turn in session.turns)
        return 0.0

    async def seeds(order: int) -> list[list[int]]:
        items = [{"order": order}, {"order": order + 1}]
        values: dict[str, Any] = {} if where == "request" else {"seed": 7}
        run = sglrl.rollout(client, agent, items, group_size=2, gateway=True, **values)
        groups = sorted([group async for group in run], key=lambda group: group.index)
        return [t.metadata["seeds"] for group in groups for t in group.trajectories]

    found = await seeds(0)
    everything = [seed for sample in found for seed in sample]
    assert len(set(everything)) == len(everything) == 2 * 2 * 9
    assert await seeds(10) == found


async def test_choices_of_requests_without_a_session(client: sglrl.Client) -> None:
    async def seeds(prompts: int, n: int, **values: Any) -> list[int | None]:
        requests = client.requests
        prepared = requests.samplings.prepare(None, values)
        bodies = [np.array(PROMPT, "<i4").tobytes()] * prompts
        calls, _ = requests.samples(bodies, n, prepared, requests.options())
        decode = msgspec.msgpack.Decoder(SentSampling).decode
        return [decode(call.args.sampling).seed for call in calls]

    found = await seeds(4, 2, seed=7)
    assert found[0] == 7
    assert len(set(found)) == 8
    assert await seeds(1, 8, seed=7) == found
    assert await seeds(4, 2) == [None] * 8


async def test_choices_of_http_requests_without_a_session(client: sglrl.Client) -> None:
    async def seeds(*given: tuple[int, int]) -> list[int | None]:
        base = SessionSpec(client.requests)
        requests = [
            TurnRequest(prompt=PROMPT, choices=n, sampling={"seed": seed, "max_new_tokens": 2})
            for n, seed in given
        ]
        made = await StatelessTurn(base, requests, lambda *_: None).result()
        return [completion.params.seed for completion in made]

    found = await seeds((3, 7), (3, 7))
    assert found[0] == 7
    assert len(set(found)) == 6
    assert await seeds((6, 7)) == found
    assert await seeds((1, 5), (1, 6)) == [5, 6], "each prompt has the seed that it was given"
