"""Agents in their own processes: a run gives the same results as in this process."""

from __future__ import annotations

import asyncio
import datetime
import functools
import os
import random
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from processes import descendants

import sglrl
from sglrl.transport.curve_keys import make_keys

ITEMS = [{"input_ids": [1 + i % 900, 2, 3], "id": i} for i in range(24)]
FAKE: dict[str, Any] = {
    "engine": "fake",
    "replicas": 2,
    "tokens_per_step": 4,
    "vocab_size": 1000,
    "context_length": 256,
}

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
async def client() -> AsyncIterator[sglrl.Client]:
    async with sglrl.launch("fake", **FAKE) as client:
        yield client


def agents() -> Callable[..., Any]:
    """Return an agent that is defined in a function, and is therefore pickled by value."""

    async def two_turns(session: sglrl.Session, item: dict[str, Any]) -> float:
        await session.generate(max_new_tokens=6)
        session.reward(0.5)
        session.observe([7, 8])
        await session.generate(max_new_tokens=3)
        session.metadata["pid"] = os.getpid()
        return float(item["id"])

    return two_turns


async def until(condition: Callable[[], Any]) -> Any:
    """Poll until another process has written its result, for which there is no event."""
    async with asyncio.timeout(20):
        while not (found := condition()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return found


def new_weights(client: sglrl.Client) -> None:
    """Do what the weight channel does after an update; the fake engine has no weights."""
    weights = client._pool.weights
    weights.version += 1
    for listener in list(weights.on_version):
        listener()


async def test_the_trajectories_are_those_of_one_process(client: sglrl.Client) -> None:
    async def run(processes: int | None) -> tuple[dict[int, sglrl.Group], sglrl.RolloutMetrics]:
        found = sglrl.rollout(client, agents(), ITEMS, group_size=3, seed=5, processes=processes)
        return {group.index: group async for group in found}, found.metrics

    here, metrics = await run(None)
    away, metrics_away = await run(3)
    assert here.keys() == away.keys() == {*range(24)}
    for index, group in here.items():
        assert away[index].item is ITEMS[index]
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

    (group,) = [g async for g in sglrl.rollout(client, agent, ITEMS[:1], processes=1)]
    (trajectory,) = group.trajectories
    assert trajectory.logprobs.tolist() == [-1, 0]
    assert trajectory.oldest_version == 0


@pytest.mark.parametrize("processes", [None, 2])
async def test_a_class_is_made_where_its_agents_run(
    client: sglrl.Client, tmp_path: Path, processes: int | None
) -> None:
    class Agent:
        def __init__(self) -> None:
            self.lock = threading.Lock()  # cannot be pickled
            self.entered = False

        async def __aenter__(self) -> Agent:
            self.entered = True
            (tmp_path / f"entered-{os.getpid()}").touch(exist_ok=False)
            return self

        async def __aexit__(self, *exc: object) -> None:
            (tmp_path / f"left-{os.getpid()}").touch(exist_ok=False)

        async def __call__(self, session: sglrl.Session, item: dict[str, Any]) -> float:
            with self.lock:
                assert self.entered
            await session.generate(max_new_tokens=1)
            return 1.0

    run = sglrl.rollout(client, Agent, ITEMS, processes=processes)
    assert len([g async for g in run]) == 24
    names = sorted(name.split("-")[0] for name in os.listdir(tmp_path))
    assert names == ["entered", "left"] if processes is None else ["entered"] * 2 + ["left"] * 2


@pytest.mark.parametrize("processes", [None, 2])
async def test_a_class_of_which_no_instance_can_be_made(
    client: sglrl.Client, processes: int | None
) -> None:
    class Broken:
        def __init__(self) -> None:
            raise RuntimeError("no database")

    class Uncallable:
        pass

    for agent, match in (
        (Broken, "no database"),
        (Uncallable, "Uncallable makes cannot be called"),
    ):
        run = sglrl.rollout(client, agent, ITEMS, processes=processes)
        error = sglrl.WorkerStartError if processes else (RuntimeError, sglrl.UsageError)
        with pytest.raises(error, match=match):
            async with run:
                pass
        with pytest.raises(sglrl.UsageError, match="begun once"):
            async with run:
                pass


@pytest.mark.parametrize("processes", [None, 1])
async def test_a_class_with_arguments(client: sglrl.Client, processes: int | None) -> None:
    class Scaled:
        def __init__(self, scale: float) -> None:
            self.scale = scale
            self.entered = 0

        def __enter__(self) -> Scaled:
            self.entered += 1
            return self

        def __exit__(self, *exc: object) -> None: ...

        async def __call__(self, session: sglrl.Session, item: Any) -> float:
            await session.generate(max_new_tokens=1)
            return self.scale * self.entered

    made = functools.partial(Scaled, 2.5)
    run = sglrl.rollout(client, made, ITEMS[:2], processes=processes)
    assert [t.reward async for g in run for t in g.trajectories] == [2.5, 2.5]
    with pytest.raises((sglrl.WorkerStartError, TypeError)) as caught:
        async with sglrl.rollout(client, Scaled, ITEMS, processes=processes):
            pass
    said = str(caught.value) + "".join(getattr(caught.value, "__notes__", []))
    assert "functools.partial(Scaled, ...)" in said


async def test_it_is_left_in_the_task_in_which_it_was_entered(
    client: sglrl.Client, tmp_path: Path
) -> None:
    """Cancel scopes and task groups must be exited in the task that entered them."""

    class Agent:
        async def __aenter__(self) -> Agent:
            self.task = asyncio.current_task()
            self.group = asyncio.TaskGroup()
            await self.group.__aenter__()
            self.group.create_task(asyncio.sleep(0.01))
            return self

        async def __aexit__(self, *exc: object) -> None:
            await self.group.__aexit__(None, None, None)
            (tmp_path / str(self.task is asyncio.current_task())).touch()

        async def __call__(self, session: sglrl.Session, item: dict[str, Any]) -> float:
            await session.generate(max_new_tokens=1)
            return 1.0

    assert len([g async for g in sglrl.rollout(client, Agent, ITEMS, processes=1)]) == 24
    assert os.listdir(tmp_path) == ["True"]


async def test_an_agent_that_depends_on_what_the_driver_has(client: sglrl.Client) -> None:
    async def agent(session: sglrl.Session, item: Any) -> float:
        return float(len(await client.stats()))

    with pytest.raises(sglrl.UsageError, match=r"cannot be sent to other processes.*give a class"):
        sglrl.rollout(client, agent, ITEMS, processes=2)
    with pytest.raises(sglrl.UsageError, match="processes must be an integer of at least 1"):
        sglrl.rollout(client, agents(), ITEMS, processes=0)


async def test_an_item_that_cannot_be_sent_costs_its_own_group(client: sglrl.Client) -> None:
    class Odd(datetime.tzinfo):
        def utcoffset(self, when: Any) -> Any:
            raise RuntimeError("no idea")

    for wrong in (object(), datetime.datetime(2026, 1, 1, tzinfo=Odd())):
        items = [*ITEMS[:3], {"input_ids": [1], "id": 3, "wrong": wrong}, *ITEMS[4:6]]
        run = sglrl.rollout(client, agents(), items, processes=1, retries=1)
        assert sorted([g.index async for g in run]) == [0, 1, 2, 4, 5]
        assert "item 3 of the data set cannot be sent" in str(run.errors[-1])
        assert run.metrics.samples_lost == {"error": 1}
    assert run.metrics.samples_retried == 0, "it is the data set that is wrong"


async def test_samples_of_a_group_begin_alike(client: sglrl.Client) -> None:
    """This process builds the session spec once per group, from the original item."""

    class Question(NamedTuple):
        ids: list[int]

    def open_session(item: Question) -> dict[str, Any]:
        sampling = sglrl.SamplingParams(max_new_tokens=3, temperature=0.5)
        return {"input_ids": [*item.ids, random.randrange(900)], "sampling": sampling}

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

    run = sglrl.rollout(client, agent, ITEMS[:2], processes=1, open_session=broken)
    with pytest.raises(sglrl.InvalidRequest, match="outside the vocabulary"):
        await run.__aenter__()
        try:
            await run.take(1)
        finally:
            await run.close()


# --- failures in other processes ------------------------------------------------------------------


async def test_errors_are_told_and_run_again(client: sglrl.Client, tmp_path: Path) -> None:
    async def agent(session: sglrl.Session, item: dict[str, Any]) -> float:
        await session.generate(max_new_tokens=2)
        try:
            (tmp_path / f"{item['id']}-{session.metadata['sample']}").touch(exist_ok=False)
        except FileExistsError:
            return 1.0
        raise KeyError(f"the environment of {item['id']} broke")

    run = sglrl.rollout(client, agent, ITEMS[:4], group_size=2, processes=2)
    assert len([g async for g in run]) == 4
    assert run.metrics.samples_retried == 8
    assert run.metrics.turns == 16, "those of failed samples count"
    error = run.errors[0]
    assert isinstance(error, sglrl.RemoteError)
    assert error.kind == "KeyError"
    assert "in agent" in error.traceback
    assert __file__ in error.traceback


async def test_an_error_may_end_the_run(client: sglrl.Client) -> None:
    async def agent(session: sglrl.Session, item: dict[str, Any]) -> float:
        await session.generate(max_new_tokens=1)
        if item["id"] == 5:
            raise ValueError("the environment broke")
        return 1.0

    with pytest.raises(sglrl.RemoteError, match="ValueError: the environment broke"):
        async for _ in sglrl.rollout(client, agent, ITEMS, on_error="raise", processes=2):
            pass


async def test_errors_of_sglrl_are_what_they_are_here(client: sglrl.Client) -> None:
    async def agent(session: sglrl.Session, item: dict[str, Any]) -> float:
        await session.generate(max_new_tokens=1)
        if item["id"] == 0:
            await session.generate(max_new_token=1)
        if item["id"] == 1:
            raise sglrl.DeadlineExceeded("a tool took too long")
        if item["id"] == 2:
            session.metadata["lock"] = threading.Lock()
        if item["id"] == 3:
            return "a text"  # type: ignore[return-value]
        return 1.0

    run = sglrl.rollout(client, agent, ITEMS[:8], processes=1, retries=1)
    assert sorted([g.index async for g in run]) == [4, 5, 6, 7]
    kinds = {type(error).__name__ for error in run.errors}
    assert kinds == {"InvalidRequest", "DeadlineExceeded", "UsageError"}
    # Samples that fail because of their own input are not retried, and neither is their group.
    assert run.metrics.samples_retried == 1
    said = "".join(map(str, run.errors))
    for text in ("did you mean", "metadata of this trajectory cannot be sent", "must return its"):
        assert text in said


async def test_errors_of_others_with_names_of_sglrls(client: sglrl.Client) -> None:
    async def agent(session: sglrl.Session, item: dict[str, Any]) -> float:
        class InvalidRequest(Exception):
            pass

        await session.generate(max_new_tokens=1)
        if item["id"] == 1:
            raise InvalidRequest("of a tool")
        return 1.0

    run = sglrl.rollout(client, agent, ITEMS[:3], processes=1, retries=1)
    assert sorted([g.index async for g in run]) == [0, 2]
    error = run.errors[0]
    assert isinstance(error, sglrl.RemoteError)
    assert (error.kind, "in agent" in error.traceback) == ("InvalidRequest", True)
    assert run.metrics.samples_retried == 1


@pytest.mark.parametrize("processes", [None, 1])
async def test_what_ends_a_program_ends_the_run(
    client: sglrl.Client, processes: int | None
) -> None:
    class Panic(BaseException):
        pass

    async def agent(session: sglrl.Session, item: dict[str, Any]) -> float:
        await session.generate(max_new_tokens=1)
        raise Panic("an extension's")

    error = sglrl.SglrlError if processes else Panic
    with pytest.raises(error, match="an extension's"):
        async for _ in sglrl.rollout(client, agent, ITEMS, processes=processes):
            pass


async def test_agents_that_cancel_themselves_have_failed(client: sglrl.Client) -> None:
    async def agent(session: sglrl.Session, item: dict[str, Any]) -> float:
        await session.generate(max_new_tokens=1)
        if item["id"] == 1:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await asyncio.sleep(1)
        return 1.0

    run = sglrl.rollout(client, agent, ITEMS[:3], processes=1, retries=0)
    assert sorted([g.index async for g in run]) == [0, 2]
    assert "cancelled by something that it awaited" in str(run.errors[-1])


@pytest.mark.parametrize("processes", [None, 1])
async def test_who_computes_for_too_long_is_late(
    client: sglrl.Client, processes: int | None
) -> None:
    """A sample times out, even if its process could not report during the computation."""

    async def agent(session: sglrl.Session, item: dict[str, Any]) -> float:
        await session.generate(max_new_tokens=1)
        if item["id"] == 1:
            time.sleep(0.4)  # noqa: ASYNC251
        return 1.0

    run = sglrl.rollout(
        client, agent, ITEMS[:4], processes=processes, timeout=0.2, concurrency=1, retries=0
    )
    assert sorted([g.index async for g in run]) == [0, 2, 3]
    assert run.metrics.samples_lost == {"timeout": 1}


async def test_an_agent_that_is_not_async_ends_the_run(client: sglrl.Client) -> None:
    def agent(session: sglrl.Session, item: Any) -> float:
        return 1.0

    with pytest.raises(sglrl.UsageError, match="the agent must be async: it returned"):
        async for _ in sglrl.rollout(client, agent, ITEMS, processes=1):  # type: ignore[arg-type]
            pass


async def test_an_agent_that_never_works_is_not_run_over_all_data(client: sglrl.Client) -> None:
    async def agent(session: sglrl.Session, item: Any) -> float:
        raise RuntimeError("nothing works")

    endless = (ITEMS[i % 24] for i in range(10**9))
    with pytest.raises(sglrl.RemoteError, match="nothing works") as caught:
        async for _ in sglrl.rollout(client, agent, endless, processes=2):
            pass
    assert "none of the first 32 samples" in "".join(caught.value.__notes__)


async def test_stragglers_are_cancelled_and_counted(client: sglrl.Client, tmp_path: Path) -> None:
    async def agent(session: sglrl.Session, item: dict[str, Any]) -> float:
        await session.generate(max_new_tokens=1)
        if item["id"] == 7:
            try:
                await asyncio.Event().wait()
            finally:
                (tmp_path / "cancelled").touch()
        return 1.0

    run = sglrl.rollout(client, agent, ITEMS[:9], timeout=0.5, processes=2, retries=0)
    assert sorted([g.index async for g in run]) == [0, 1, 2, 3, 4, 5, 6, 8]
    assert run.metrics.samples_lost == {"timeout": 1}
    assert "took longer than 0.5 s" in str(run.errors[-1])
    assert (tmp_path / "cancelled").exists()


async def test_a_group_that_is_given_up_takes_its_samples_with_it(
    client: sglrl.Client, tmp_path: Path
) -> None:
    async def agent(session: sglrl.Session, item: dict[str, Any]) -> float:
        await session.generate(max_new_tokens=1)
        if item["id"] == 1 and session.metadata["sample"]:
            try:
                (tmp_path / "waits").touch()
                await asyncio.Event().wait()
            finally:
                (tmp_path / "cancelled").touch()
        if item["id"] == 1:
            await until(lambda: (tmp_path / "waits").exists())
            raise RuntimeError("the other one is of no use then")
        return 1.0

    run = sglrl.rollout(
        client, agent, ITEMS[:3], group_size=2, on_error="drop", retries=0, processes=2
    )
    assert sorted([g.index async for g in run]) == [0, 2]
    assert run.metrics.samples_lost == {"error": 1, "given up": 1}
    await until(lambda: (tmp_path / "cancelled").exists())


async def test_turns_of_what_was_given_up_count(client: sglrl.Client, tmp_path: Path) -> None:
    async def agent(session: sglrl.Session, item: dict[str, Any]) -> float:
        await session.generate(max_new_tokens=3)
        if item["id"] == 1 and session.metadata["sample"]:
            (tmp_path / "waits").touch()
            await asyncio.Event().wait()
        if item["id"] == 1:
            await until(lambda: (tmp_path / "waits").exists())
            raise RuntimeError("the other one is of no use then")
        if item["id"] == 2:
            await until(lambda: (tmp_path / "last").exists())
        return 1.0

    run = sglrl.rollout(
        client, agent, ITEMS[:3], group_size=2, on_error="drop", retries=0, processes=1
    )
    async with run:
        await run.take(1)
        await until(lambda: run.metrics.samples_lost.get("given up"))
        (tmp_path / "last").touch()
        await run.take(1)
        assert (run.metrics.turns, run.metrics.generated_tokens) == (6, 18)


async def test_a_process_that_dies_costs_its_samples_a_try(
    client: sglrl.Client, tmp_path: Path
) -> None:
    async def agent(session: sglrl.Session, item: dict[str, Any]) -> float:
        await session.generate(max_new_tokens=2)
        if item["id"] == 11 and not (tmp_path / "died").exists():
            (tmp_path / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        session.metadata["pid"] = os.getpid()
        return float(item["id"])

    run = sglrl.rollout(client, agent, ITEMS, group_size=2, processes=2, concurrency=8)
    groups = {g.index: g async for g in run}
    assert groups.keys() == {*range(24)}
    assert all(len(group.trajectories) == 2 for group in groups.values())
    assert 1 <= run.metrics.samples_retried <= 8
    assert any(isinstance(error, sglrl.WorkerLost) for error in run.errors)
    # The pool knows only the clients that still exist.
    server = client._server
    assert server is not None
    await until(lambda: not any(peer.calls for peer in server._peers.values()))


async def test_many_that_are_lost_at_once_are_no_failures(
    client: sglrl.Client, tmp_path: Path
) -> None:
    """Many samples are lost at once before any sample has succeeded."""

    async def agent(session: sglrl.Session, item: dict[str, Any]) -> float:
        await session.generate(max_new_tokens=1)
        (tmp_path / f"pid-{os.getpid()}").touch()
        await until(lambda: (tmp_path / "go").exists())
        return 1.0

    items = [{"input_ids": [1 + i], "id": i} for i in range(100)]
    run = sglrl.rollout(client, agent, items, processes=2, concurrency=100, on_error="drop")
    async with run:
        (first, _) = await until(lambda: len(os.listdir(tmp_path)) == 2 and os.listdir(tmp_path))
        os.kill(int(first.split("-")[1]), signal.SIGKILL)
        await until(lambda: run.metrics.samples_retried >= 33)
        (tmp_path / "go").touch()
        assert len(await run.take(100)) == 100
    assert run.metrics.samples_lost == {}


async def test_a_sample_that_kills_its_process_costs_the_others_nothing(
    client: sglrl.Client,
) -> None:
    async def agent(session: sglrl.Session, item: dict[str, Any]) -> float:
        await session.generate(max_new_tokens=1)
        if item["id"] == 5:
            os._exit(7)
        await asyncio.sleep(0.02)
        return 1.0

    for processes, group_size in ((1, 2), (2, 4), (4, 1)):
        run = sglrl.rollout(
            client, agent, ITEMS, processes=processes, group_size=group_size, concurrency=8
        )
        assert sorted([g.index async for g in run]) == [i for i in range(24) if i != 5]
        assert sum(run.metrics.samples_lost.values()) == group_size
        assert run.metrics.samples_lost["error"] == 1
        assert run.metrics.groups_dropped == 1
    (error,) = {str(e) for e in run.errors if getattr(e, "__notes__", None)}
    # The driver notices the exited process first, or the broken connection when it sends.
    assert "exited with status 7" in error or "its connection is gone" in error


async def test_a_replacement_in_which_no_agent_can_be_made_gets_no_samples(
    client: sglrl.Client, tmp_path: Path
) -> None:
    class Once:
        def __init__(self) -> None:
            if len(os.listdir(tmp_path)) == 2:
                raise RuntimeError("no licence left")
            (tmp_path / f"pid-{os.getpid()}").touch()

        async def __call__(self, session: sglrl.Session, item: dict[str, Any]) -> float:
            await session.generate(max_new_tokens=1)
            await asyncio.sleep(0.005)
            return 1.0

    items = [{"input_ids": [1 + i % 900]} for i in range(400)]
    run = sglrl.rollout(client, Once, items, processes=2, concurrency=8, on_error="raise")
    async with run:
        await run.take(10)
        os.kill(int(os.listdir(tmp_path)[0].split("-")[1]), signal.SIGKILL)
        assert len(await run.take(390)) == 390
    assert run.metrics.samples_lost == {}


async def test_processes_that_always_die_end_the_run(client: sglrl.Client) -> None:
    async def agent(session: sglrl.Session, item: dict[str, Any]) -> float:
        os.kill(os.getpid(), signal.SIGKILL)
        return 1.0

    run = sglrl.rollout(client, agent, ITEMS, processes=4, concurrency=4, retries=100)
    with pytest.raises(sglrl.WorkerLost):
        async for _ in run:
            pass


async def test_the_pools_end_ends_the_run() -> None:
    async def agent(session: sglrl.Session, item: dict[str, Any]) -> float:
        while True:
            await session.generate(max_new_tokens=2)
            session = session._spec.client.session(input_ids=[1])

    async with sglrl.launch("fake", **FAKE) as client:
        run = sglrl.rollout(client, agent, ITEMS, processes=2, retries=1000)
        async with run:
            taking = asyncio.ensure_future(run.take(1))
            await until(lambda: run.metrics.samples_running == 24)
            await client.close()
            with pytest.raises(sglrl.SglrlError):
                await taking


# --- start and close of processes -----------------------------------------------------------------


async def test_leaving_early_leaves_nothing(client: sglrl.Client, tmp_path: Path) -> None:
    async def agent(session: sglrl.Session, item: dict[str, Any]) -> float:
        await session.generate(max_new_tokens=1)
        if item["id"]:
            try:
                (tmp_path / f"waits-{item['id']}").touch()
                await asyncio.Event().wait()
            finally:
                (tmp_path / f"cancelled-{item['id']}").touch()
        return 1.0

    before = set(descendants())
    run = sglrl.rollout(client, agent, ITEMS[:8], processes=2, concurrency=8)
    async with run:
        assert [group.index for group in await run.take(1)] == [0]
        await until(lambda: len(os.listdir(tmp_path)) == 7)
    assert len(os.listdir(tmp_path)) == 14
    new = {pid: name for pid, name in descendants().items() if pid not in before}
    assert not [name for name in new.values() if "spare" not in name and "fork" not in name], new
    assert await client.generate(input_ids=[1], max_new_tokens=1)


def slow(started: Path) -> type[Any]:
    """Return an agent class that starts slowly, and creates ``started`` when its start begins."""

    class Slow:
        async def __aenter__(self) -> Slow:
            started.touch()  # noqa: ASYNC240
            await asyncio.sleep(0.5)
            return self

        async def __aexit__(self, *exc: object) -> None: ...

        async def __call__(self, session: sglrl.Session, item: Any) -> float:
            return 1.0

    return Slow


async def test_a_client_that_is_closed_while_a_run_starts(tmp_path: Path) -> None:
    for processes in (None, 2):
        started = tmp_path / f"{processes}"
        async with sglrl.launch("fake", **FAKE) as client:
            run = sglrl.rollout(client, slow(started), ITEMS, processes=processes)
            entering = asyncio.ensure_future(run.__aenter__())
            await until(started.exists)
            await client.close()
            with pytest.raises(sglrl.SglrlError):
                await entering
    # conftest.py checks that the processes have exited.


@pytest.mark.parametrize("processes", [None, 2])
async def test_closing_a_run_while_it_starts(
    client: sglrl.Client, tmp_path: Path, processes: int | None
) -> None:
    run = sglrl.rollout(client, slow(tmp_path / "started"), ITEMS, processes=processes)
    entering = asyncio.ensure_future(run.__aenter__())
    await until((tmp_path / "started").exists)
    await run.close()
    with pytest.raises(sglrl.SglrlError):
        await entering
    assert run.metrics.samples_running == 0


async def test_a_close_that_is_cancelled_twice_ends_the_processes(client: sglrl.Client) -> None:
    async def work(run: sglrl.Rollout) -> None:
        async with run:
            await asyncio.Event().wait()

    for turns in range(1, 5):
        run = sglrl.rollout(client, agents(), ITEMS, processes=1)
        task = asyncio.ensure_future(work(run))
        await until(lambda run=run: run.metrics.samples_done)  # type: ignore[misc]
        task.cancel()
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert run._runner._host.driver.fabric.closed


async def test_pausing_before_and_after(client: sglrl.Client) -> None:
    run = sglrl.rollout(client, agents(), ITEMS, processes=1)
    await run.pause(timeout=1)
    async with run:
        with pytest.raises(sglrl.DeadlineExceeded):
            await run.take(1, timeout=0.3)
        run.resume()
        assert len(await run.take(24)) == 24
    await run.pause(timeout=1)
    run.resume()


async def test_a_paused_run_samples_nothing(client: sglrl.Client) -> None:
    async def agent(session: sglrl.Session, item: dict[str, Any]) -> float:
        for _ in range(60):
            await session.generate(max_new_tokens=2)
            await asyncio.sleep(0.005)
        return 1.0

    async def generated() -> int:
        return sum(s.engine.generated_tokens for s in await client.stats())

    run = sglrl.rollout(client, agent, ITEMS, processes=2, concurrency=12)
    async with run:
        while not await generated():
            pass
        for _ in range(3):
            await run.pause(timeout=10)
            before = await generated()
            await asyncio.sleep(0.1)
            assert await generated() == before
            assert run.metrics.samples_running
            run.resume()
        assert len(await run.take(24)) == 24
    assert run.metrics.samples_lost == {}


async def test_a_process_that_comes_while_the_run_is_paused(
    client: sglrl.Client, tmp_path: Path
) -> None:
    """Samples that wait for the new process begin no turns during the pause."""

    async def agent(session: sglrl.Session, item: dict[str, Any]) -> float:
        (tmp_path / str(os.getpid())).touch()
        await until(lambda: (tmp_path / "go").exists())
        await session.generate(max_new_tokens=2)
        return 1.0

    run = sglrl.rollout(client, agent, ITEMS, processes=1, concurrency=4, retries=5)
    async with run:
        (first,) = await until(lambda: os.listdir(tmp_path))
        os.kill(int(first), signal.SIGKILL)
        # The killed process's samples will be retried; they wait for its replacement.
        await until(lambda: run.metrics.samples_retried == 4)
        await run.pause(timeout=10)
        (tmp_path / "go").touch()
        await until(lambda: len(os.listdir(tmp_path)) == 3)
        await asyncio.sleep(0.1)
        assert [s.engine.generated_tokens for s in await client.stats()] == [0, 0]
        run.resume()
        assert len(await run.take(24)) == 24
    assert run.metrics.samples_retried == 4


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
        client, agent, ITEMS, batch_size=4, max_staleness=staleness, processes=2, concurrency=4
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
        version = session._spec.client.weight_version
        return made.replace(versions=np.where(made.loss_mask, version, -1))

    endless = (ITEMS[i % 24] for i in range(10**9))
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
        version = session._spec.client.weight_version
        return made.replace(versions=np.where(made.loss_mask, version, -1))

    run = sglrl.rollout(client, agent, ITEMS, batch_size=4, max_staleness=1, processes=2)
    async with run:
        for step in range(4):
            batch = await run.take(4)
            assert all(group.staleness <= 1 for group in batch)
            await until(lambda: run.metrics.groups_ready == 4)
            assert len(os.listdir(tmp_path)) == (step + 2) * 4
            new_weights(client)


async def test_a_run_that_was_stopped_goes_on_where_it_was(client: sglrl.Client) -> None:
    run = sglrl.rollout(client, agents(), ITEMS, processes=1)
    async with run:
        done = {group.index for group in await run.take(10)}
        state = run.state_dict()
    rest = sglrl.rollout(client, agents(), ITEMS, processes=1, state=state)
    assert {group.index async for group in rest} == {*range(24)} - done


# --- kinds of clients -----------------------------------------------------------------------------


async def test_of_a_client_in_another_process(client: sglrl.Client) -> None:
    async with sglrl.connect(client.address) as remote:
        run = sglrl.rollout(remote, agents(), ITEMS, processes=2)
        assert len([g async for g in run]) == 24


async def test_with_keys(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    make_keys(folder)
    async with sglrl.launch("fake", address="tcp://127.0.0.1:*", keys=folder, **FAKE) as client:
        run = sglrl.rollout(client, agents(), ITEMS, processes=2)
        assert len([g async for g in run]) == 24
        async with sglrl.connect(client.address, keys=folder) as remote:
            run = sglrl.rollout(remote, agents(), ITEMS, processes=1)
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
        client.rollout(agents(), ITEMS, processes=1) as run,
    ):
        assert len(run.take(2)) == 2
        client.close()


def test_blocking() -> None:
    with sglrl.blocking("fake", **FAKE) as client:
        with client.rollout(agents(), ITEMS, processes=2, batch_size=8) as run:
            begun = time.monotonic()
            assert [len(batch) for batch in run.batches()] == [8, 8, 8]
            assert time.monotonic() - begun < 30
        assert len([*client.rollout(agents(), ITEMS, processes=1)]) == 24


async def test_a_process_that_is_cut_off_is_replaced(client: sglrl.Client, tmp_path: Path) -> None:
    """The pool has dropped the process's client, like a client that has not read for too long."""

    async def agent(session: sglrl.Session, item: dict[str, Any]) -> float:
        (tmp_path / f"pid-{os.getpid()}").touch()
        await until(lambda: (tmp_path / "go").exists())
        await session.generate(max_new_tokens=1)
        return 1.0

    run = sglrl.rollout(client, agent, ITEMS, processes=2, concurrency=8, retries=0)
    async with run:
        await until(lambda: len(os.listdir(tmp_path)) == 2)
        server = client._server
        assert server is not None
        (first, _) = server._peers.values()
        server._dismiss(first.identity, "it has not read for so long")
        server._forget(first)
        (tmp_path / "go").touch()
        assert len(await run.take(24)) == 24
        await run._runner._host._handle.wait_until_full(20)
    assert run.metrics.samples_lost == {}
    assert run.metrics.samples_retried >= 1
    assert any("lost its connection to the pool" in str(error) for error in run.errors)
