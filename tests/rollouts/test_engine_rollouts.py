"""Agents that run ahead of a trainer on the real engine.

Every trajectory of the run is replayed by transformers, with the weights of each version span.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from engine.policies import PROMPTS, Lab, Policies
from readme import example

import sglrl

pytestmark = pytest.mark.asyncio(loop_scope="session")

ITEMS = [{"input_ids": prompt} for prompt in PROMPTS]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def lab(models: Path) -> AsyncIterator[Lab]:
    policies = Policies(models / "rollout-policies")
    async with sglrl.launch(
        policies[0].folder, device="cpu", max_running_requests=12, weight_device="cpu"
    ) as client:
        yield Lab(client, policies)


def made() -> Any:
    """Return a nested function, which can run in processes that do not import this module."""

    async def agent(session: sglrl.Session, item: dict[str, Any]) -> float:
        for observed in ([7, 8], [300]):
            await session.generate(max_new_tokens=25, ignore_eos=True)
            session.observe(observed)
        await session.generate(max_new_tokens=10)
        return float(session.ids.sum() % 7)

    return agent


agent = made()


def replay(lab: Lab, trajectory: sglrl.Trajectory) -> None:
    """Check a trajectory only by its own data: tokens, versions and turns."""
    ids, start = trajectory.input_ids, len(trajectory.prompt_ids)
    for turn in trajectory.turns:
        versions = trajectory.versions[turn.start : turn.stop].tolist()
        spans, at = [], 0
        for version, same in itertools.groupby(versions):
            count = len(list(same))
            spans.append(sglrl.VersionSpan(at, at + count, version))
            at += count
        made: Any = SimpleNamespace(
            prompt_ids=ids[: start + turn.start],
            output_ids=ids[start + turn.start : start + turn.stop],
            versions=tuple(spans),
            resumed_at=(),
        )
        np.testing.assert_allclose(
            trajectory.logprobs[turn.start : turn.stop],
            lab.expected(made, again=False),
            atol=lab.tolerance,
            rtol=0,
        )


@pytest.mark.parametrize(("staleness", "processes"), [(0, None), (1, None), (1, 2)])
async def test_training_on_rollouts_that_run_ahead(
    lab: Lab, staleness: int, processes: int | None
) -> None:
    client = lab.client
    run = sglrl.rollout(
        client,
        agent,
        itertools.cycle(ITEMS),
        group_size=2,
        batch_size=3,
        max_staleness=staleness,
        concurrency=12,
        processes=processes,
        seed=1,
    )
    spans = set()
    async with run:
        for step in range(5):
            for group in await run.take(3):
                assert 0 <= client.weight_version - group.oldest_version <= staleness
                for trajectory in group.trajectories:
                    replay(lab, trajectory)
                    found = set(trajectory.versions[trajectory.loss_mask].tolist())
                    spans.add(len(found))
                    assert min(found) >= client.weight_version - staleness
            await lab.update(1 + step % 2)
        assert run.metrics.groups_taken == 15
    if not staleness:
        assert spans == {1}


async def test_the_same_seed_gives_the_same_rollouts(lab: Lab) -> None:
    async def rolled(seed: int, processes: int | None = None) -> list[list[list[int]]]:
        run = sglrl.rollout(lab.client, agent, ITEMS, group_size=3, seed=seed, processes=processes)
        groups = {g.index: g async for g in run}
        return [
            [t.response_ids.tolist() for t in groups[i].trajectories] for i in range(len(ITEMS))
        ]

    first = await rolled(3)
    assert await rolled(3) == first
    assert await rolled(4) != first
    assert await rolled(3, processes=2) == first
    for group in first:
        assert len({tuple(ids) for ids in group}) == 3, "samples of a group differ"


@pytest.mark.parametrize("processes", [None, 1])
async def test_one_seed_for_all_samples_gives_different_ones(
    lab: Lab, processes: int | None
) -> None:
    """Samples, forks, and turns that are sampled again do not repeat each other."""

    async def talk(session: sglrl.Session, item: Any) -> float:
        values: dict[str, Any] = {"max_new_tokens": 12, "ignore_eos": True, **item["turn"]}
        await session.generate(**values)
        session.go_back()
        forks = [session, session.fork(), session.fork()]
        await asyncio.gather(*[fork.generate(**values) for fork in forks])
        session.metadata["turns"] = [turn.output_ids.tolist() for turn in session.turns]
        return 0.0

    async def rolled(in_turns: dict[str, int], concurrency: int, **values: Any) -> list[list[int]]:
        run = sglrl.rollout(
            lab.client,
            talk,
            [{**ITEMS[0], "turn": in_turns}] * 2,
            group_size=4,
            concurrency=concurrency,
            processes=processes,
            **values,
        )
        groups = sorted([group async for group in run], key=lambda group: group.index)
        return [sorted(t.metadata["turns"]) for g in groups for t in g.trajectories]

    sampling = sglrl.SamplingParams(seed=7)
    for in_turns, values in (({}, {"sampling": sampling}), ({"seed": 7}, {})):
        found = await rolled(in_turns, 8, **values)
        texts = [tuple(ids) for turns in found for ids in turns]
        assert len(set(texts)) == len(texts) == 2 * 4 * 4
        assert await rolled(in_turns, 3, **values) == found


async def test_conversations_in_other_processes(lab: Lab) -> None:
    """The processes load the tokenizer and produce the same tokens."""

    async def talk(session: sglrl.Session, item: Any) -> float:
        turn = await session.generate(max_new_tokens=8)
        session.observe({"role": "user", "content": f"You said {turn.text!r}. Why?"})
        await session.generate(max_new_tokens=8)
        session.metadata["text"] = session.text
        return 1.0

    items: list[Any] = [
        {"messages": [{"role": "user", "content": "2 + 2?"}]},
        [{"role": "user", "content": "And 3 + 3?"}],
    ]
    found = []
    for processes in (None, 1):
        run = sglrl.rollout(lab.client, talk, items, seed=7, processes=processes)
        groups = {g.index: g.trajectories[0] async for g in run}
        found.append([(groups[i].input_ids.tolist(), groups[i].metadata["text"]) for i in range(2)])
    assert found[0] == found[1]
    assert "Why?" in found[0][0][1]


async def test_turns_of_a_group_share_the_prefix_cache(lab: Lab) -> None:
    """Cached tokens of a sample's prompt were computed with the weights of its turn."""
    await lab.other()
    prompt = [3 + (7 * i) % 480 for i in range(200)]
    run = sglrl.rollout(
        lab.client, agent, [{"input_ids": prompt}], group_size=6, concurrency=1, seed=0
    )
    (group,) = [g async for g in run]
    turns = [t.turns for t in group.trajectories]
    assert turns[0][0].cached_tokens == 0, "these weights have not seen it yet"
    # The engine computes at least the last token of every prompt.
    assert all(t[0].cached_tokens == 199 for t in turns[1:])
    assert all(
        after.cached_tokens >= before.prompt_tokens + (before.stop - before.start) - 1
        for t in turns
        for before, after in itertools.pairwise(t)
    )


async def test_what_the_readme_shows(lab: Lab) -> None:
    code = example("run.batches")
    sizes = "group_size=8, batch_size=16"
    assert code.count(sizes) == 1
    code = code.replace(sizes, "group_size=3, batch_size=4")
    trained: list[list[sglrl.Group]] = []
    names: dict[str, Any] = {"asyncio": asyncio, "sglrl": sglrl}
    exec(compile(code, "README.md", "exec"), names)
    policy = lab.policies[2 if lab.current is not lab.policies[2] else 1]
    names["items"] = names["items"][:4]
    await names["train"](lab.client, policy.model, lambda model, groups: trained.append(groups))
    lab.by_version[lab.client.weight_version] = policy
    (groups,) = trained
    assert len(groups) == 4
    assert all(len(g.trajectories) == 3 for g in groups)
    # The random model calls no tool.
    assert {len(t.turns) for g in groups for t in g.trajectories} == {1}
    await lab.check(PROMPTS[:1], 4)
