"""Runs beside a trainer, with agents in their own processes."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sglrl

from .agents import (
    SOME_ITEMS,
    new_weights,
    until,
)


@pytest.mark.parametrize("staleness", [0, 1])
async def test_tokens_that_are_too_old_are_not_handed_out(
    client: sglrl.Client, tmp_path: Path, staleness: int
) -> None:
    async def agent(session: sglrl.Session, item: dict[str, Any]) -> float:
        await session.generate(max_new_tokens=2)
        if item["id"] == 1 and not (tmp_path / "held").exists():
            (tmp_path / "held").touch()
            try:
                await asyncio.Event().wait()
            finally:
                (tmp_path / "cancelled").touch()
        return 1.0

    run = sglrl.rollout(
        client, agent, SOME_ITEMS, batch_size=4, max_staleness=staleness, processes=2, concurrency=4
    )
    async with run:
        await until(lambda: (tmp_path / "held").exists())
        await until(lambda: run.metrics.groups_ready >= 3)
        for _ in range(staleness):
            new_weights(client)
        assert not (tmp_path / "cancelled").exists()
        new_weights(client)
        await until(lambda: (tmp_path / "cancelled").exists())
        await until(lambda: run.metrics.samples_lost.get("stale", 0) >= 1)


async def test_samples_that_begin_behind_an_update_are_not_stale(client: sglrl.Client) -> None:
    """Samples and version news reach a process over different connections."""

    async def agent(session: sglrl.Session, item: dict[str, Any]) -> sglrl.Trajectory:
        await session.generate(max_new_tokens=2)
        made = session.trajectory(1.0)
        version = session.spec.requests.weights.version
        return made.replace(versions=np.where(made.loss_mask, version, -1))

    endless = (SOME_ITEMS[i % 24] for i in range(10**9))
    run = sglrl.rollout(
        client, agent, endless, batch_size=8, group_size=2, max_staleness=0, processes=2, retries=0
    )
    async with run:
        for version in range(60):
            assert {group.oldest_version for group in await run.take(8)} == {version}
            new_weights(client)
        assert run.metrics.samples_lost == {}


async def test_it_is_bounded_how_far_they_run_ahead(client: sglrl.Client, tmp_path: Path) -> None:
    async def agent(session: sglrl.Session, item: dict[str, Any]) -> sglrl.Trajectory:
        (tmp_path / str(item["id"])).touch()
        await session.generate(max_new_tokens=2)
        made = session.trajectory(1.0)
        version = session.spec.requests.weights.version
        return made.replace(versions=np.where(made.loss_mask, version, -1))

    run = sglrl.rollout(client, agent, SOME_ITEMS, batch_size=4, max_staleness=1, processes=2)
    async with run:
        for step in range(4):
            batch = await run.take(4)
            assert all(group.staleness <= 1 for group in batch)
            await until(lambda: run.metrics.groups_ready == 4)
            assert len(os.listdir(tmp_path)) == (step + 2) * 4
            new_weights(client)
