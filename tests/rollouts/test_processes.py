"""Agents in their own processes: a run gives the same results as in this process."""

from __future__ import annotations

import datetime
import itertools
import os
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import sglrl
from sglrl.transport.curve_keys import make_keys

from .agents import (
    FAKE,
    SOME_ITEMS,
    nested_agent,
)


async def test_the_trajectories_are_those_of_one_process(client: sglrl.Client) -> None:
    async def run(processes: int | None) -> tuple[dict[int, sglrl.Group], sglrl.RolloutMetrics]:
        found = sglrl.rollout(
            client, nested_agent(), SOME_ITEMS, group_size=3, seed=5, processes=processes
        )
        return {group.index: group async for group in found}, found.metrics

    here, metrics = await run(None)
    away, metrics_away = await run(3)
    assert here.keys() == away.keys() == {*range(24)}
    for index, group in here.items():
        assert away[index].item is SOME_ITEMS[index]
        for one, other in zip(group.trajectories, away[index].trajectories, strict=True):
            for name in ("prompt_ids", "response_ids", "loss_mask", "logprobs", "versions"):
                mine, its = getattr(one, name), getattr(other, name)
                np.testing.assert_array_equal(mine, its)
                assert mine.dtype == its.dtype
                assert not its.flags.writeable
            assert one.rewards.tolist() == other.rewards.tolist() == [0.5, float(index)]
            assert one.oldest_version == other.oldest_version == 0
            for mine, its in zip(one.turns, other.turns, strict=True):
                assert (mine.start, mine.stop, mine.prompt_tokens, mine.finish_reason) == (
                    (its.start, its.stop, its.prompt_tokens, its.finish_reason)
                )
            assert 0 < other.timing.generating <= other.timing.total
            assert one.metadata["sample"] == other.metadata["sample"]
            assert other.metadata["item"] == index
            # ``replace`` checks all fields of the received trajectory.
            other.replace(metadata={})
    pids = {t.metadata["pid"] for group in away.values() for t in group.trajectories}
    assert len(pids) == 3
    assert os.getpid() not in pids
    for name in ("turns", "generated_tokens", "prompt_tokens", "samples_done", "samples_lost"):
        assert getattr(metrics, name) == getattr(metrics_away, name), name


@pytest.mark.parametrize("here", [True, False])
async def test_processes_share_the_import_of_the_tokenizer(
    client: sglrl.Client, monkeypatch: pytest.MonkeyPatch, here: bool
) -> None:
    """The processes import transformers before they fork if the driver has imported it."""
    if here:
        import transformers  # noqa: F401
    else:
        monkeypatch.delitem(sys.modules, "transformers", raising=False)

    async def agent(session: sglrl.Session, item: Any) -> float:
        await session.generate(max_new_tokens=1)
        return float("transformers" in sys.modules)

    run = sglrl.rollout(client, agent, [{"input_ids": [1]}], processes=1)
    assert [t.reward async for group in run for t in group.trajectories] == [here]


async def test_items_and_metadata_of_every_kind(client: sglrl.Client) -> None:
    async def agent(session: sglrl.Session, item: Any) -> float:
        session.metadata["got"] = item["extra"]
        session.metadata["doubled"] = item["extra"]["array"] * 2
        await session.generate(max_new_tokens=1)
        return float(item["extra"]["array"].sum())

    extra = {"array": np.arange(3.0), "text": "ä", "pair": (1, 2), "none": None, 7: b"bytes"}
    run = sglrl.rollout(client, agent, [{"input_ids": [1], "extra": extra}], processes=1)
    ((group,)) = [g async for g in run]
    (trajectory,) = group.trajectories
    got = trajectory.metadata["got"]
    assert got["array"].tolist() == [0, 1, 2]
    assert (got["text"], got["pair"], got["none"], got[7]) == ("ä", [1, 2], None, b"bytes")
    assert trajectory.metadata["doubled"].tolist() == [0, 2, 4]
    assert trajectory.reward == 3


async def test_a_trajectory_of_the_agents_own(client: sglrl.Client) -> None:
    async def agent(session: sglrl.Session, item: Any) -> sglrl.Trajectory:
        await session.generate(max_new_tokens=2)
        made = session.trajectory(1.0)
        return made.replace(loss_mask=[1, 0], versions=[0, -1], logprobs=[-1, 0])

    (group,) = [g async for g in sglrl.rollout(client, agent, SOME_ITEMS[:1], processes=1)]
    (trajectory,) = group.trajectories
    assert trajectory.logprobs.tolist() == [-1, 0]
    assert trajectory.oldest_version == 0


async def test_an_agent_that_depends_on_what_the_driver_has(client: sglrl.Client) -> None:
    async def agent(session: sglrl.Session, item: Any) -> float:
        return float(len(await client.stats()))

    with pytest.raises(sglrl.UsageError, match=r"cannot be sent to other processes.*pass a class"):
        sglrl.rollout(client, agent, SOME_ITEMS, processes=2)
    with pytest.raises(sglrl.UsageError, match="processes must be an integer of at least 1"):
        sglrl.rollout(client, nested_agent(), SOME_ITEMS, processes=0)


async def test_an_item_that_cannot_be_sent_costs_its_own_group(client: sglrl.Client) -> None:
    class Odd(datetime.tzinfo):
        def utcoffset(self, when: Any) -> Any:
            raise RuntimeError("no idea")

    for wrong in (object(), datetime.datetime(2026, 1, 1, tzinfo=Odd())):
        items = [*SOME_ITEMS[:3], {"input_ids": [1], "id": 3, "wrong": wrong}, *SOME_ITEMS[4:6]]
        run = sglrl.rollout(client, nested_agent(), items, processes=1, retries=1)
        assert sorted([g.index async for g in run]) == [0, 1, 2, 4, 5]
        assert "item 3 of the data set cannot be sent" in str(run.errors[-1])
        assert run.metrics.samples_lost == {"error": 1}
    assert run.metrics.samples_retried == 0, "it is the data set that is wrong"


async def test_samples_of_a_group_begin_alike(client: sglrl.Client) -> None:
    """This process builds the session spec once per group, from the original item."""

    class Question(NamedTuple):
        ids: list[int]

    openings = itertools.count(1)

    def open_session(item: Question) -> dict[str, Any]:
        sampling = sglrl.SamplingParams(max_new_tokens=3, temperature=0.5)
        return {"input_ids": [*item.ids, next(openings)], "sampling": sampling}

    async def agent(session: sglrl.Session, item: Any) -> float:
        assert item == [[5, 6]], "a tuple is a list there"
        assert len((await session.generate()).output_ids) == 3
        return 1.0

    run = sglrl.rollout(
        client, agent, [Question([5, 6])] * 4, group_size=6, processes=3, open_session=open_session
    )
    groups = [g async for g in run]
    assert len(groups) == 4
    for group in groups:
        assert len({tuple(t.prompt_ids.tolist()) for t in group.trajectories}) == 1

    def broken(item: Any) -> dict[str, Any]:
        return {"input_ids": [10**6]}

    run = sglrl.rollout(client, agent, SOME_ITEMS[:2], processes=1, open_session=broken)
    with pytest.raises(sglrl.InvalidRequest, match="outside the vocabulary"):
        await run.__aenter__()
        try:
            await run.take(1)
        finally:
            await run.close()


async def test_a_run_that_was_stopped_goes_on_where_it_was(client: sglrl.Client) -> None:
    run = sglrl.rollout(client, nested_agent(), SOME_ITEMS, processes=1)
    async with run:
        done = {group.index for group in await run.take(10)}
        state = run.state_dict()
    rest = sglrl.rollout(client, nested_agent(), SOME_ITEMS, processes=1, state=state)
    assert {group.index async for group in rest} == {*range(24)} - done


async def test_of_a_client_in_another_process(client: sglrl.Client) -> None:
    async with sglrl.connect(client.address) as remote:
        run = sglrl.rollout(remote, nested_agent(), SOME_ITEMS, processes=2)
        assert len([g async for g in run]) == 24


async def test_with_keys(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    make_keys(folder)
    async with sglrl.launch("fake", address="tcp://127.0.0.1:*", keys=folder, **FAKE) as client:
        run = sglrl.rollout(client, nested_agent(), SOME_ITEMS, processes=2)
        assert len([g async for g in run]) == 24
        async with sglrl.connect(client.address, keys=folder) as remote:
            run = sglrl.rollout(remote, nested_agent(), SOME_ITEMS, processes=1)
            assert len([g async for g in run]) == 24


async def test_actors_see_the_environment_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    class Env(sglrl.Actor):
        @sglrl.endpoint
        async def get(self, name: str) -> str | None:
            return os.environ.get(name)

    async with sglrl.spawn(Env):
        pass
    monkeypatch.setenv("SGLRL_TEST_LATER", "now")
    async with sglrl.spawn(Env, env={"OTHER": "o"}) as actors:
        assert await actors.get("SGLRL_TEST_LATER") == "now"
        assert await actors.get("OTHER") == "o"


def test_a_blocking_client_closes_its_runs() -> None:
    with (
        sglrl.blocking("fake", **FAKE) as client,
        client.rollout(nested_agent(), SOME_ITEMS, processes=1) as run,
    ):
        assert len(run.take(2)) == 2
        client.close()


def test_blocking() -> None:
    with sglrl.blocking("fake", **FAKE) as client:
        with client.rollout(nested_agent(), SOME_ITEMS, processes=2, batch_size=8) as run:
            begun = time.monotonic()
            assert [len(batch) for batch in run.batches()] == [8, 8, 8]
            assert time.monotonic() - begun < 30
        assert len([*client.rollout(nested_agent(), SOME_ITEMS, processes=1)]) == 24
