"""``sglrl.evaluate``: scores of all items, with a score function or an agent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from engine.reference import Reference

import sglrl

from .agents import FAKE

pytestmark = pytest.mark.asyncio(loop_scope="session")
ITEMS = [{"input_ids": [5 + i, 17, 40 + i], "number": i} for i in range(5)]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def engine(qwen: Path) -> AsyncIterator[sglrl.Client]:
    async with sglrl.launch(qwen, device="cpu") as client:
        yield client


@pytest_asyncio.fixture(loop_scope="session")
async def client() -> AsyncIterator[sglrl.Client]:
    async with sglrl.launch("fake", **FAKE) as client:
        yield client


async def test_greedy_texts_are_those_of_transformers(
    engine: sglrl.Client, reference: Reference
) -> None:
    seen: dict[int, str] = {}

    def score(item: Any, text: str) -> bool:
        seen[item["number"]] = text
        return item["number"] % 2 == 0

    result = await sglrl.evaluate(engine, ITEMS, score, temperature=0, max_new_tokens=6)
    for item, group in zip(ITEMS, result.groups, strict=True):
        assert group.item == item
        expected = reference.greedy(item["input_ids"], 6)
        assert group.trajectories[0].response_ids.tolist() == expected
        assert seen[group.index] == engine.tokenizer.decode(expected, skip_special_tokens=True)
    tokens = sum(len(group.trajectories[0].response_ids) for group in result.groups)
    assert (result.items, result.samples, result.tokens) == (5, 5, tokens)
    assert (result.mean_score, result.pass_at_k) == (0.6, {1: 0.6})


async def test_samples_are_repeated_by_their_seed(engine: sglrl.Client) -> None:
    async def score(item: Any, text: str) -> float:
        await asyncio.sleep(0)
        return len(text) % 3

    options: dict[str, Any] = {"samples": 4, "max_new_tokens": 5}
    runs = [await sglrl.evaluate(engine, ITEMS, score, seed=s, **options) for s in (1, 1, 2)]
    texts = [[t.text for g in run.groups for t in g.trajectories] for run in runs]
    assert texts[0] == texts[1] != texts[2]
    assert len(set(texts[0])) > len(ITEMS)
    first = runs[0]
    assert first.mean_score == runs[1].mean_score
    rewards = [[sample.reward for sample in group.trajectories] for group in first.groups]
    assert first.mean_score == sum(map(sum, rewards)) / 20
    assert list(first.pass_at_k) == [1, 2, 4]
    assert first.pass_at_k[4] == sum(max(r) >= 1 for r in rewards) / 5
    assert first.pass_at_k[1] == pytest.approx(sum(x >= 1 for r in rewards for x in r) / 20)


async def test_an_agent_has_several_turns(client: sglrl.Client) -> None:
    async def agent(session: sglrl.Session, item: Any) -> dict[str, float]:
        for _ in range(3):
            await session.generate(max_new_tokens=2)
            session.observe([7, 8])
        return {"number": item["number"], "bonus": 1}

    result = await sglrl.evaluate(client, ITEMS, agent=agent, samples=2, k=[2])
    assert result.tokens == 5 * 2 * 3 * 2
    assert result.truncated == 1
    assert result.mean_score == 3
    assert result.pass_at_k == {2: 1}
    assert result.groups[3].trajectories[1].named_rewards == {"number": 3, "bonus": 1}


async def test_it_runs_beside_a_rollout_and_an_update(
    engine: sglrl.Client, reference: Reference
) -> None:
    async def agent(session: sglrl.Session, item: Any) -> float:
        return len((await session.generate(max_new_tokens=4)).text)

    endless = ({"input_ids": [9, 9 + i % 7]} for i in range(10_000))
    before = engine.weight_version
    async with sglrl.rollout(engine, agent, endless, group_size=2) as run:
        await run.take(1)
        evaluation = asyncio.ensure_future(
            sglrl.evaluate(engine, ITEMS, lambda item, text: 1, max_new_tokens=4, samples=8)
        )
        await engine.update_weights(reference.model)
        result = await evaluation
        await run.take(1)
    assert result.samples == 40
    versions = {t.oldest_version for group in result.groups for t in group.trajectories}
    assert versions <= {before, before + 1}


async def test_an_exception_ends_it(engine: sglrl.Client) -> None:
    def score(item: Any, text: str) -> float:
        return 1 / item["number"]

    with pytest.raises(ZeroDivisionError):
        await sglrl.evaluate(engine, ITEMS, score, max_new_tokens=2)
    result = await sglrl.evaluate(engine, ITEMS[1:], score, max_new_tokens=2)
    assert result.mean_score == pytest.approx((1 + 1 / 2 + 1 / 3 + 1 / 4) / 4)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "give either score or agent"),
        ({"score": len, "agent": len}, "give either score or agent"),
        ({"score": "exact"}, "score must be a function"),
        ({"score": max, "samples": 2, "k": [3]}, r"k must be in 1\.\.2, .* got 3"),
        ({"score": max, "samples": 0}, "group_size must be"),
        ({"score": max, "items": []}, "items is empty"),
        ({"score": max, "max_new_token": 3}, "did you mean 'max_new_tokens'"),
    ],
)
async def test_wrong_arguments(client: sglrl.Client, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(sglrl.UsageError, match=words):
        await sglrl.evaluate(client, **{"items": ITEMS, **arguments})
