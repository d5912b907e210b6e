"""Rollouts of agents that speak HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
from engine.policies import until_idle, until_running

import sglrl

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client() -> AsyncIterator[sglrl.Client]:
    async with sglrl.launch(
        "tiny",
        engine="fake",
        step_seconds=0.001,
        tokens_per_step=1,
        enable_return_routed_experts=True,
    ) as client:
        yield client


async def ask(base_url: str, api_key: str, turns: int) -> None:
    messages: list[Any] = [{"role": "user", "content": "Hi"}]
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as api:
        for _ in range(turns):
            made = await api.chat.completions.create(model="any", messages=messages)
            messages += [made.choices[0].message, {"role": "user", "content": "Go on."}]


@pytest.mark.parametrize("processes", [None, 2])
async def test_an_agent_needs_only_the_url_and_the_key(
    client: sglrl.Client, processes: int | None
) -> None:
    async def agent(session: sglrl.Session, item: dict[str, Any]) -> float:
        session.metadata["task"] = item["task"]
        await ask(session.base_url, session.api_key, item["turns"])
        assert len(session.turns) == item["turns"]
        # The session itself goes on after the last turn of a request.
        session.reward(2.0, "format")
        session.observe([5, 6])
        await session.generate(max_new_tokens=2)
        return 1.0

    items = [{"task": f"task {n}", "turns": n} for n in (1, 2, 3)]
    async with sglrl.rollout(
        client, agent, items, group_size=3, gateway=True, processes=processes, max_new_tokens=4
    ) as run:
        groups = sorted([group async for group in run], key=lambda group: int(group.index))
    for turns, group in enumerate(groups, 1):
        for trajectory in group.trajectories:
            assert trajectory.branches == ()
            sizes = [turn.stop - turn.start for turn in trajectory.turns]
            assert sizes == [4] * turns + [2]
            assert trajectory.metadata["task"] == f"task {turns}"
            assert trajectory.named_rewards == {"format": 2.0}
            assert trajectory.reward == 3.0
    assert run.metrics.turns == 3 * (2 + 3 + 4)


async def test_trajectories_have_routed_experts(client: sglrl.Client) -> None:
    async def agent(session: sglrl.Session, item: int) -> float:
        await ask(session.base_url, session.api_key, 3)
        begins = [turn.routed_from for turn in session.turns]
        assert begins == [0, *(turn.routed_rows.stop for turn in session.turns[:-1])]  # type: ignore[union-attr]
        return 1.0

    wanted: Any = {"max_new_tokens": 4, "return_routed_experts": True}
    async with sglrl.rollout(client, agent, [0], gateway=True, **wanted) as run:
        (group,) = [group async for group in run]
    (trajectory,) = group.trajectories
    assert trajectory.routed_experts is not None
    assert len(trajectory.routed_experts) == len(trajectory.input_ids) - 1


@pytest.mark.parametrize("processes", [None, 1])
async def test_agents_that_block_run_in_threads(
    client: sglrl.Client, processes: int | None
) -> None:
    """More of them than threads in which rendering could run."""
    loop = asyncio.get_running_loop()

    def work(base_url: str, api_key: str) -> None:
        with openai.OpenAI(base_url=base_url, api_key=api_key, timeout=300) as api:
            for _ in range(2):
                api.chat.completions.create(
                    model="any", messages=[{"role": "user", "content": "Hi"}], max_tokens=8
                )

    async def agent(session: sglrl.Session, item: int) -> float:
        await asyncio.to_thread(work, session.base_url, session.api_key)
        return 0.0

    with ThreadPoolExecutor(2) as few:
        loop.set_default_executor(few)
        async with sglrl.rollout(
            client, agent, range(16), gateway=True, processes=processes, concurrency=16, timeout=300
        ) as run:
            groups = [group async for group in run]
        loop.set_default_executor(ThreadPoolExecutor())
    assert [len(group.trajectories[0].leaves) for group in groups] == [2] * 16


async def test_turns_that_run_at_the_end_of_an_agent_are_aborted(client: sglrl.Client) -> None:
    async def agent(session: sglrl.Session, item: int) -> float:
        base_url, api_key = session.base_url, session.api_key
        await ask(base_url, api_key, 1)
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2000}
        slow.append(asyncio.ensure_future(http.post(f"{base_url}/chat/completions", json=body)))
        await until_running(client, 1)
        return 0.0

    slow: list[asyncio.Future[httpx.Response]] = []
    async with (
        httpx.AsyncClient(timeout=300) as http,
        sglrl.rollout(client, agent, [0], gateway=True, max_new_tokens=4) as run,
    ):
        (group,) = [group async for group in run]
        await until_idle(client)
        assert (await slow[0]).status_code == 503
    (trajectory,) = group.trajectories
    assert [turn.stop - turn.start for turn in trajectory.turns] == [4]
    assert trajectory.branches == ()


async def test_seeds_repeat(client: sglrl.Client) -> None:
    found = []
    for _ in range(2):
        seeds = []

        async def agent(session: sglrl.Session, item: int, seeds: Any = seeds) -> float:
            await ask(session.base_url, session.api_key, 2)
            seeds += [turn.params.seed for turn in session.turns]
            return 0.0

        async with sglrl.rollout(
            client, agent, [0], gateway=True, max_new_tokens=4, seed=5, group_size=2
        ) as run:
            assert len([group async for group in run]) == 1
        found.append(sorted(seeds))
    assert found[0] == found[1]
    assert len(set(found[0])) == 4


async def test_sampling_masks(client: sglrl.Client) -> None:
    async def agent(session: sglrl.Session, item: int) -> float:
        await ask(session.base_url, session.api_key, 2)
        return 0.0

    limits: dict[str, Any] = {"max_new_tokens": 4, "top_k": 8, "return_sampling_mask": True}
    async with sglrl.rollout(client, agent, [0], gateway=True, **limits) as run:
        (group,) = [group async for group in run]
    for trajectory in group.trajectories:
        mask = trajectory.sampling_mask
        assert mask is not None
        assert (mask.lengths > 0).tolist() == trajectory.loss_mask.tolist()
        assert trajectory.loss_mask.sum() == 8


async def test_sessions_that_a_header_selects(client: sglrl.Client) -> None:
    """A relay has one URL for all sessions. Requests with unknown headers belong to none."""

    async def agent(session: sglrl.Session, item: int) -> None:
        relay = session.base_url.partition("/sessions/")[0] + "/v1"
        forks = [session.fork(), session.fork()]
        for number, fork in enumerate(forks):
            fork.accept_header(f"fork-{number}-{session.metadata['sample']}")
        headers = [fork for fork in range(2) for _ in range(fork + 1)]
        async with httpx.AsyncClient(timeout=300) as http:
            model = (await http.get(f"{relay}/models")).json()["data"][0]["id"]
            for header in [*headers, 7]:
                answer = await http.post(
                    f"{relay}/chat/completions",
                    json={
                        "model": model, "messages": [{"role": "user", "content": f"Hi {header}"}],
                        "max_tokens": 4,
                    },
                    headers={"X-Session-ID": f"fork-{header}-{session.metadata['sample']}"},
                )  # fmt: skip
                assert answer.status_code == 200
            # The key takes precedence.
            await ask(session.base_url, session.api_key, 1)
        assert [fork.position.last for fork in forks] == [0, 2]
        forks[0].reward(1.0, "first", weight=0.5)
        forks[1].reward(2.0, "second")
        with pytest.raises(sglrl.UsageError, match="another session has the id 'fork-1-"):
            forks[0].accept_header(f"fork-1-{session.metadata['sample']}")

    for _ in range(2):
        async with sglrl.rollout(
            client, agent, [0], gateway=True, group_size=2, max_new_tokens=4, on_error="raise"
        ) as run:
            (group,) = [group async for group in run]
        for trajectory in group.trajectories:
            turns = [turn for leaf in trajectory.leaves for turn in leaf.turns]
            assert [turn.reward for turn in turns] == [0.5, 0, 2.0, 0]


async def test_a_session_without_a_gateway(client: sglrl.Client) -> None:
    async with client.session(input_ids=[5]) as session:
        for name in ("base_url", "api_key"):
            with pytest.raises(sglrl.UsageError, match="pass gateway=True to rollout"):
                getattr(session, name)
        with pytest.raises(sglrl.UsageError, match="pass gateway=True to rollout"):
            session.accept_header("relay")
        for wrong in ("", " a", "é", 7):
            with pytest.raises(sglrl.UsageError, match="session_id must be ASCII characters"):
                session.accept_header(wrong)  # type: ignore[arg-type]

    async def agent(session: sglrl.Session, item: int) -> float:
        await session.generate()
        return 0.0

    with pytest.raises(sglrl.UsageError, match="has no prompt"):
        async with sglrl.rollout(client, agent, [0], gateway=True) as run:
            assert not [group async for group in run]
    with pytest.raises(sglrl.UsageError, match="has no prompt"):
        async with sglrl.rollout(client, agent, [0]) as run:
            assert not [group async for group in run]
