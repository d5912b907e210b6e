"""Runs with many failures: how often samples are retried, what is logged, when the run ends."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import Any

import pytest

import sglrl

ITEMS = [{"input_ids": [1 + i % 900, 2, 3], "id": i} for i in range(300)]


class Bad:
    """An agent that fails at all items but the first, or at every item that ``fails`` selects."""

    def __init__(self, fails: Any = lambda item: item["id"] > 0) -> None:
        self.attempts: Counter[tuple[int, int]] = Counter()
        self.fails = fails

    async def __call__(self, session: sglrl.Session, item: Any) -> float:
        self.attempts[item["id"], session.metadata["sample"]] += 1
        await session.generate(max_new_tokens=1)
        if self.fails(item):
            raise LookupError("the environment broke")
        return 1.0


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "sglrl.rollout"]


@pytest.mark.parametrize("min_group", [None, 8])
async def test_retries_are_a_budget_of_each_sample(
    client: sglrl.Client, caplog: pytest.LogCaptureFixture, min_group: int | None
) -> None:
    caplog.set_level(logging.INFO)
    agent = Bad()
    run = sglrl.rollout(
        client,
        agent,
        ITEMS,
        group_size=8,
        min_group=min_group,
        retries=2,
        max_failure_rate=None,
        concurrency=64,
    )
    assert [group.index async for group in run] == [0]
    assert max(agent.attempts.values()) <= 3
    assert run.metrics.groups_dropped == 299
    said = lines(caplog)
    failed = run._runner.failures.failed
    assert len(said) == 1 + len(str(failed)) - 1 + 2, "once, at powers of ten, and at the end"
    assert "failed: LookupError: the environment broke" in said[0]
    assert caplog.records[0].exc_info, "the first one with its traceback"
    assert said[-2].startswith("299 groups were dropped because of failed samples, and 1 ")
    assert said[-1].startswith(f"in all, {failed} samples have failed with LookupError")


@pytest.mark.parametrize("processes", [None, 2])
async def test_a_run_in_which_nearly_all_fails_ends(
    client: sglrl.Client, processes: int | None
) -> None:
    # This agent is pickled by value, so it cannot count attempts in this process.
    async def agent(session: sglrl.Session, item: Any) -> float:
        await session.generate(max_new_tokens=1)
        if item["id"] == 299:
            raise ValueError("another one")
        if item["id"] > 3:
            raise LookupError("the environment broke")
        return 1.0

    items = [*ITEMS[:4], ITEMS[299], *ITEMS[4:]]
    with pytest.raises(sglrl.RolloutFailed) as caught:
        async for _ in sglrl.rollout(client, agent, items, concurrency=4, processes=processes):
            pass
    message = str(caught.value)
    assert "% of the last 64 attempts failed" in message
    assert "at most 90% may (max_failure_rate)" in message
    assert "times: LookupError: " in message
    assert "the environment broke" in message
    assert caught.value.__cause__ is not None


async def test_late_attempts_count(client: sglrl.Client) -> None:
    async def agent(session: sglrl.Session, item: Any) -> float:
        await session.generate(max_new_tokens=1)
        if item["id"] > 3:
            await asyncio.Event().wait()
        return 1.0

    with pytest.raises(sglrl.RolloutFailed, match="DeadlineExceeded: the agent took longer"):
        async for _ in sglrl.rollout(client, agent, ITEMS, timeout=0.2, concurrency=16):
            pass


async def test_a_rate_that_is_allowed_does_not_end_the_run(client: sglrl.Client) -> None:
    half = Bad(lambda item: item["id"] % 2)
    run = sglrl.rollout(client, half, ITEMS, retries=0, max_failure_rate=0.75, concurrency=8)
    assert len([group async for group in run]) == 150
    most = Bad(lambda item: item["id"] % 4)
    run = sglrl.rollout(client, most, ITEMS, retries=0, max_failure_rate=0.5, concurrency=8)
    with pytest.raises(sglrl.RolloutFailed, match="at most 50% may"):
        async for _ in run:
            pass


async def test_errors_that_are_dropped_at_once_are_not_tried_again(client: sglrl.Client) -> None:
    agent = Bad(lambda item: item["id"] % 2)
    run = sglrl.rollout(client, agent, ITEMS[:20], on_error="drop", retries=2, group_size=2)
    assert len([group async for group in run]) == 10
    assert max(agent.attempts.values()) == 1


@pytest.mark.parametrize("rate", [0, -0.1, 1.1, float("nan"), True, "0.9"])
async def test_rates_that_are_none(client: sglrl.Client, rate: Any) -> None:
    with pytest.raises(sglrl.UsageError, match="max_failure_rate must be None or in"):
        sglrl.rollout(client, Bad(), ITEMS, max_failure_rate=rate)
