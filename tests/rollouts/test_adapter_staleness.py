"""Runs whose tokens an adapter samples, beside a trainer that replaces the adapter."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sglrl
from sglrl.rollouts import load, save

from .agents import FAKE, ITEMS, new_weights, one_turn, until

CONFIG = {"r": 2, "lora_alpha": 4}
NAME = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
TENSORS = {NAME.format("A"): torch.ones(2, 8), NAME.format("B"): torch.ones(8, 2)}
pytestmark = pytest.mark.timeout(60)


@pytest.fixture
async def client() -> AsyncIterator[sglrl.Client]:
    more = {"max_lora_rank": 4, "lora_target_modules": ["q_proj"]}
    async with sglrl.launch("fake", **FAKE, **more) as client:
        for name in ("x", "y"):
            await client.load_lora(name, TENSORS, config=CONFIG)
        yield client


async def update(client: sglrl.Client, lora: str = "x") -> None:
    await client.update_weights(TENSORS, lora=lora)


@pytest.mark.parametrize("processes", [None, 2])
@pytest.mark.parametrize("way", ["run", "open_session"])
async def test_each_new_adapter_is_a_step(
    client: sglrl.Client, way: str, processes: int | None
) -> None:
    def open_session(item: dict[str, Any]) -> Mapping[str, Any]:
        return {"input_ids": item["input_ids"], "lora": "x"}

    given: dict[str, Any] = {"lora": "x"} if way == "run" else {"open_session": open_session}
    sizes: dict[str, Any] = {"group_size": 2, "batch_size": 2, "max_staleness": 0}
    async with sglrl.rollout(
        client, one_turn, ITEMS[:12], processes=processes, **sizes, **given
    ) as run:
        steps = 0
        async for groups in run.batches():
            assert [group.lora_versions for group in groups] == [{"x": steps}] * 2
            assert [group.staleness for group in groups] == [0, 0]
            steps += 1
            await update(client)
    assert steps == 6
    assert run.metrics.samples_lost == {}


async def test_a_run_of_a_client_in_another_process_counts_them(client: sglrl.Client) -> None:
    async with (
        sglrl.connect(client.address) as other,
        sglrl.rollout(other, one_turn, ITEMS[:8], batch_size=2, max_staleness=0, lora="x") as run,
    ):
        assert other.policy_versions == {"": 0, "x": 0, "y": 0}
        for step in range(4):
            assert [group.staleness for group in await run.take(2)] == [0, 0]
            await update(client)
            await until(lambda wanted=step + 1: other.policy_versions["x"] == wanted)


async def test_the_age_of_a_group_is_that_of_its_adapter(
    client: sglrl.Client, tmp_path: Path
) -> None:
    async def agent(session: sglrl.Session, item: Any) -> float:
        await session.generate(max_new_tokens=2)
        for _ in range(3):
            await update(client)
        await session.generate(max_new_tokens=2)
        return 1.0

    async with sglrl.rollout(client, agent, ITEMS[:1], lora="x") as run:
        (group,) = await run.take()
    assert (group.staleness, group.version, group.lora_versions) == (3, 0, {"x": 3})
    assert run.metrics.mean_staleness == 3
    (made,) = group.trajectories
    assert made.oldest_versions == {"": 0, "x": 0}
    assert [turn.lora for turn in made.turns] == ["x", "x"]
    save(tmp_path / "file", [made])
    (loaded,) = load(tmp_path / "file")
    assert loaded.oldest_versions == made.oldest_versions
    assert loaded.turns == made.turns
    # The arrays themselves give the same ages.
    own = made.replace(lora_versions=np.where(made.loss_mask, 2, -1))
    assert own.oldest_versions == {"": 0, "x": 2}


@pytest.mark.parametrize("processes", [None, 2])
@pytest.mark.parametrize("updated", ["x", "y", ""])
async def test_running_samples_of_an_adapter_become_too_old(
    client: sglrl.Client, tmp_path: Path, updated: str, processes: int | None
) -> None:
    """Tokens of an adapter depend on the adapter and on the model, and not on other adapters."""

    async def agent(session: sglrl.Session, item: dict[str, Any]) -> sglrl.Trajectory:
        await session.generate(max_new_tokens=2)
        if not (tmp_path / "held").exists():
            (tmp_path / "held").touch()
            while not (tmp_path / "go").exists():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            (tmp_path / "continued").touch()
        # The weights of a fake engine are always of version 0.
        made = session.trajectory(1.0)
        version = session.spec.requests.weights.version
        return made.replace(versions=np.where(made.loss_mask, version, -1))

    run = sglrl.rollout(
        client, agent, ITEMS[:1], batch_size=1, max_staleness=1, lora="x", processes=processes
    )
    async with run:
        await until((tmp_path / "held").exists)
        for _ in range(2):
            if updated:
                await update(client, updated)
            else:
                new_weights(client)
        if updated == "y":
            (tmp_path / "go").touch()
        (group,) = await run.take()
    assert (tmp_path / "continued").exists() == (updated == "y")
    assert run.metrics.samples_lost == ({} if updated == "y" else {"stale": 1})
    assert group.failed == group.stale == group.staleness == 0


async def test_a_conversation_may_have_turns_of_several_adapters(client: sglrl.Client) -> None:
    """Each turn is as old as its own adapter."""

    async def agent(session: sglrl.Session, item: Any) -> float:
        await session.generate(max_new_tokens=2)
        fork = session.fork_with(session.spec.sibling(lora="y", input_ids=[5]))
        await fork.generate(max_new_tokens=2)
        session.reward(1.0)
        for _ in range(2):
            await update(client, "y")
        return 0.0

    async with sglrl.rollout(client, agent, ITEMS[:1], lora="x") as run:
        (group,) = await run.take()
    assert (group.staleness, group.lora_versions) == (2, {"x": 0, "y": 2})


@pytest.mark.parametrize("processes", [None, 2])
async def test_slow_items_are_not_lost(
    client: sglrl.Client, tmp_path: Path, processes: int | None
) -> None:
    """Two runs of each sample of some items do not end before their tokens are too old."""

    async def agent(session: sglrl.Session, item: dict[str, Any]) -> float:
        await session.generate(max_new_tokens=2)
        if item["id"] in (0, 6, 12):
            runs = tmp_path / f"{item['id']}-{session.metadata['sample']}"
            with runs.open("a") as file:
                file.write("x")
            if len(runs.read_text()) <= 2:
                await asyncio.Event().wait()
        return 1.0

    sizes: dict[str, Any] = {"group_size": 2, "batch_size": 2, "max_staleness": 2}
    async with sglrl.rollout(
        client, agent, ITEMS, lora="x", retries=0, processes=processes, **sizes
    ) as run:
        found = []
        async for groups in run.batches():
            found += groups
            assert all(len(g.trajectories) == 2 and g.failed == g.stale == 0 for g in groups)
            await update(client)
    assert sorted(group.index for group in found) == [*range(40)]
    metrics = run.metrics
    assert (metrics.groups_dropped, metrics.groups_stale, metrics.samples_retried) == (0, 0, 0)
    assert metrics.samples_lost["stale"] >= 12


async def test_the_log_names_the_adapter_that_is_awaited(
    client: sglrl.Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("sglrl.rollouts.delivery._HINT_SECONDS", 0.05)
    async with sglrl.rollout(
        client, one_turn, ITEMS, batch_size=1, max_staleness=0, lora="x"
    ) as run:
        await run.take()
        await update(client)
        await run.take()
        with pytest.raises(sglrl.DeadlineExceeded):
            await run.take(timeout=0.3)
    assert "no further group begins at version 0, 1 of 'x'" in caplog.text
