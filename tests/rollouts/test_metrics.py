"""The metrics of a run, compared with numpy on the delivered trajectories."""

from __future__ import annotations

import asyncio
import math
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import sglrl
from sglrl.rollouts import (
    Distribution,
    RolloutMetrics,
    Trajectory,
    delivery,
    load,
    save,
    stack,
    to_jsonl,
)

from .agents import ITEMS, SOME_ITEMS, two_turns


def make_agent() -> Any:
    """Return an agent with one to four turns, which is pickled by value."""

    async def agent(session: sglrl.Session, item: dict[str, Any]) -> float:
        session.metadata["waited"] = 0.0
        for turn in range(1 + item["id"] % 4):
            if turn:
                begun = time.perf_counter()
                session.observe([7] * turn)
                await asyncio.sleep(0.002 * turn)
                session.metadata["waited"] += time.perf_counter() - begun
            await session.generate(max_new_tokens=3 + item["id"])
        return float(item["id"] + session.metadata["sample"] * 0.5)

    return agent


def percentiles(values: list[float]) -> list[float]:
    """Return the mean, the percentiles and the maximum by linear interpolation."""
    ordered = np.sort(values)
    places = (len(ordered) - 1) * np.array([0.5, 0.9, 0.99])
    found = np.interp(places, np.arange(len(ordered)), ordered)
    return [float(np.mean(values)), *found.tolist(), float(ordered[-1])]


def check(metrics: RolloutMetrics, groups: list[sglrl.Group]) -> None:
    made: list[Trajectory] = [t for group in groups for t in group.trajectories]
    rewards = [t.reward for t in made]
    assert metrics.reward_std == pytest.approx(np.std(rewards))
    stds = [np.std([t.reward for t in group.trajectories]) for group in groups]
    assert metrics.group_reward_std == pytest.approx(np.mean(stds))
    cut = [t.turns[-1].finish_reason == "length" for t in made]
    assert metrics.truncated == pytest.approx(np.mean(cut))
    for name, values in (
        ("response_tokens", [float(len(t.response_ids)) for t in made]),
        ("turn_seconds", [turn.seconds for t in made for turn in t.turns]),
        ("tool_seconds", [turn.seconds_before for t in made for turn in t.turns[1:]]),
    ):
        found: Distribution = getattr(metrics, name)
        ours = [found.mean, found.p50, found.p90, found.p99, found.max]
        assert ours == pytest.approx(percentiles(values)), name


@pytest.mark.parametrize("processes", [None, 2])
async def test_distributions_are_those_of_numpy(
    client: sglrl.Client, processes: int | None
) -> None:
    run = sglrl.rollout(client, make_agent(), SOME_ITEMS, group_size=3, processes=processes)
    groups = [group async for group in run]
    assert len(groups) == len(SOME_ITEMS)
    check(run.metrics, groups)
    for group in groups:
        for trajectory in group.trajectories:
            assert trajectory.turns[0].seconds_before == 0.0
            tools = sum(turn.seconds_before for turn in trajectory.turns)
            # The clocks may differ by their resolution.
            assert trajectory.metadata["waited"] - 1e-4 <= tools <= trajectory.timing.total


async def test_a_step_is_the_difference_of_two_deliveries(client: sglrl.Client) -> None:
    run = sglrl.rollout(client, make_agent(), ITEMS, group_size=2, batch_size=8)
    before: dict[str, float] = {}
    async with run:
        assert run.metrics.step.groups_taken == 0
        async for batch in run.batches():
            metrics = run.metrics
            assert metrics.step.groups_taken == len(batch)
            after = {
                name: float(getattr(metrics, name))
                for name in ("groups_taken", "turns", "generated_tokens", "samples_done")
            }
            for name, value in after.items():
                assert getattr(metrics.step, name) == value - before.get(name, 0.0), name
            before = after
            assert metrics.step.tokens_per_second > 0


async def test_flat_metrics_are_numbers_with_stable_keys(client: sglrl.Client) -> None:
    async def agent(session: sglrl.Session, item: dict[str, Any]) -> float:
        if item["id"] == 1:
            raise ValueError("one fails")
        await session.generate(max_new_tokens=2)
        return 1.0

    run = sglrl.rollout(client, agent, ITEMS, on_error="drop")
    first = run.metrics.flat()
    groups = [group async for group in run]
    last = run.metrics.flat()
    assert first.keys() == last.keys()
    assert all(type(value) is float for value in last.values())
    assert all(name.startswith("rollout/") and " " not in name for name in last)
    assert math.isnan(first["rollout/turn_seconds/p90"])
    assert last["rollout/turn_seconds/p90"] == run.metrics.turn_seconds.p90
    assert last["rollout/groups_taken"] == len(groups) == len(ITEMS) - 1
    assert last["rollout/samples_lost/error"] == 1.0
    assert last["rollout/step/groups_taken"] == 1.0
    assert last["rollout/truncated"] == 1.0
    assert {*run.metrics.flat(prefix="")} == {name.removeprefix("rollout/") for name in first}
    with pytest.raises(TypeError):
        run.metrics.flat(1)  # type: ignore[arg-type]


async def test_old_trajectories_leave_the_distributions(client: sglrl.Client) -> None:
    async def agent(session: sglrl.Session, item: dict[str, Any]) -> float:
        await session.generate(max_new_tokens=2 if item["n"] < 40 else 5)
        return float(item["n"] < 40)

    items = [{"input_ids": [1], "n": n} for n in range(1300)]
    run = sglrl.rollout(client, agent, items, concurrency=8)
    groups = [group async for group in run]
    latest = [t for group in groups[-1024:] for t in group.trajectories]
    assert run.metrics.reward_std == pytest.approx(np.std([t.reward for t in latest]))
    assert run.metrics.response_tokens.mean == np.mean([len(t.response_ids) for t in latest])


async def test_groups_are_stacked_and_saved_as_their_trajectories(
    client: sglrl.Client, tmp_path: Path
) -> None:
    """One of the groups has lost a sample."""

    async def agent(session: sglrl.Session, item: dict[str, Any]) -> float:
        reward = await two_turns(session, item)
        if (item["id"], session.metadata["sample"]) == (1, 2):
            raise ValueError("lost")
        return reward + session.metadata["sample"] / 3

    async with sglrl.rollout(client, agent, ITEMS[:2], group_size=3, on_error="drop") as run:
        groups = sorted(await run.take(2), key=lambda group: group.index)
    made = [trajectory for group in groups for trajectory in group.trajectories]
    assert len(made) == 5
    assert repr(groups[0]) == (
        "<Group of item 0: 3 trajectories, 0 failed, rewards [0, 0.3333, 0.6667]>"
    )
    for given, wanted in ((groups, made), ([groups[1], made[0]], [*made[3:], made[0]])):
        assert (stack(given) == stack(wanted)).all()
        save(tmp_path / "file", given)
        assert [t.metadata for t in load(tmp_path / "file")] == [t.metadata for t in wanted]
        to_jsonl(tmp_path / "lines", given)
        assert len((tmp_path / "lines").read_text().splitlines()) == len(wanted)
    assert (stack(groups[1]) == stack(made[3:])).all()
    for wrong in ([groups], [5], [made[0], "text"]):
        with pytest.raises(sglrl.UsageError, match="not a Trajectory or a Group"):
            stack(wrong)  # type: ignore[arg-type]


async def test_progress_names_groups(
    client: sglrl.Client, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "sglrl.rollout")
    async with sglrl.rollout(client, two_turns, ITEMS[:3], progress=True) as run:
        await run.take(3)
    assert "3 of 3 groups taken" in caplog.text


async def test_the_log_says_what_the_first_groups_wait_for(
    client: sglrl.Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(delivery, "_HINT_SECONDS", 0.02)
    gate = asyncio.Event()

    async def agent(session: sglrl.Session, item: dict[str, Any]) -> float:
        await gate.wait()
        return await two_turns(session, item)

    async with sglrl.rollout(client, agent, ITEMS[:3], group_size=2, concurrency=6) as run:
        with pytest.raises(sglrl.DeadlineExceeded):
            await run.take(2, timeout=0.3)
        assert caplog.text.count("waits for its first groups: 6 samples run, of 3 groups") == 1
        starting = [msgspec.structs.replace(client.workers[0], state="starting")]
        monkeypatch.setattr(sglrl.Client, "workers", starting)
        with pytest.raises(sglrl.DeadlineExceeded):
            await run.take(2, timeout=0.3)
        assert caplog.text.count("waits for a worker to start") == 1
        monkeypatch.undo()
        gate.set()
        assert len(await run.take(3)) == 3
