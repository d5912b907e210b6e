"""``python -m bench.soak``: find leaks under a long load.

Two pools run for minutes with kills, weight updates and callers who cancel early. The bench
measures the memory, open files and threads of every process.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import itertools
import os
import time
from collections import Counter
from collections.abc import AsyncIterator
from functools import partial
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
import psutil
import typer

import sglrl
from sglrl.driver import fork_server

from .fault_cases import CASES, FaultCase
from .fault_load import Load
from .fault_schedule import BURST, DROP, KILL, UPDATE, schedule
from .fault_strikes import Striker, Update
from .parts import Note
from .report import Json, Report, number

_INTERVAL_SECONDS = 5.0
"""Seconds between two measurements of all processes."""
_UPDATE_SECONDS = 20.0
_PAUSE_SECONDS = 0.2
"""Seconds between two calls of a caller. The pause keeps the machine usable for other work."""
_CACHE_TOKENS = 8192
"""Size of SGLang's prefix cache in tokens. Until it is full, the cache keeps objects for every
answer, which is not a leak. A cache of this size is full before the measurements count."""
_SLACK = 2
"""Number of additional open files and threads that do not count as growth, because an update may be
running."""

POOLS = (
    CASES["fake"]._replace(replicas=4, in_flight=24, gap=10.0, shares={KILL: 3, DROP: 1}),
    CASES["sglang-cpu"]._replace(replicas=2, in_flight=4, gap=60.0, shares={KILL: 1, UPDATE: 1}),
)
"""The cases of both pools. Worker 0 of each pool is never struck, so its leaks would add up."""


class Sample(NamedTuple):
    """One measurement of a process.

    Attributes:
        minute: minutes since the start.
        rss: resident memory in MB.
        own: the part of the resident memory that is not mapped from files, in MB.
        files: number of open files.
        threads: number of threads.
    """

    minute: float
    rss: float
    own: float
    files: int
    threads: int


class Soak:
    """The pools under load, and the measurements of their processes."""

    def __init__(self, cases: tuple[FaultCase, ...], minutes: float, seed: int) -> None:
        self.cases = cases
        self.minutes = minutes
        self.seed = seed
        self.samples: dict[str, list[Sample]] = {}
        self.loads: dict[str, Load] = {}
        self.strikers: dict[str, Striker] = {}
        self.clients: dict[str, sglrl.Client] = {}
        self.early: Counter[str] = Counter()
        self.updates = 0
        self.begun = 0.0

    async def run(self, interval: float, note: Note) -> None:
        """Run the load, and measure all processes every ``interval`` seconds."""
        async with contextlib.AsyncExitStack() as stack:
            running = [await stack.enter_async_context(self._pool(case)) for case in self.cases]
            self.begun = time.monotonic()
            async with asyncio.TaskGroup() as group:
                helpers = [group.create_task(self._measure(interval, note))]
                tasks = []
                for case, update in running:
                    load, striker = self.loads[case.name], self.strikers[case.name]
                    tasks.append(group.create_task(load.run()))
                    helpers.append(group.create_task(self._leave_early(case)))
                    if update is not None:
                        helpers.append(group.create_task(self._update(update)))
                    count = int(self.minutes * 60 / case.gap)
                    faults = schedule(self.seed, count, case.gap, case.shares, BURST)
                    helpers.append(group.create_task(striker.run(faults)))
                await asyncio.sleep(self.minutes * 60)
                for load in self.loads.values():
                    load.stop()
                for task in helpers:
                    task.cancel()
                await asyncio.wait(tasks)

    @contextlib.asynccontextmanager
    async def _pool(self, case: FaultCase) -> AsyncIterator[tuple[FaultCase, Update | None]]:
        more = {} if case.is_fake else {"max_total_tokens": _CACHE_TOKENS}
        async with case.launch(**more) as client:
            update = case.update_of(client)
            load = await case.load(client, self.seed, _PAUSE_SECONDS)
            self.clients[case.name] = client
            self.loads[case.name] = load
            self.strikers[case.name] = Striker(
                client, load, among=range(1, case.replicas), update=update
            )
            yield case, update

    async def _update(self, update: Update) -> None:
        while True:
            await asyncio.sleep(_UPDATE_SECONDS)
            with contextlib.suppress(sglrl.WeightUpdateError, sglrl.WorkerLost):
                await update()
                self.updates += 1

    async def _leave_early(self, case: FaultCase) -> None:
        """Make calls and abandon them before their end. The pool must not keep their requests."""
        client = self.clients[case.name]
        wanted = {"input_ids": [1, 2, 3], "max_new_tokens": 150, "ignore_eos": True}
        for turn in itertools.count():
            await asyncio.sleep(0.1 if case.is_fake else 1.0)
            match turn % 3:
                case 0:
                    with contextlib.suppress(sglrl.DeadlineExceeded):
                        await client.generate(**wanted, timeout=0.05)
                        continue
                    self.early["deadline"] += 1
                case 1:
                    call = asyncio.ensure_future(client.generate(**wanted))
                    await asyncio.wait([call], timeout=0.05)
                    call.cancel()
                    await asyncio.wait([call])
                    self.early["cancelled"] += call.cancelled()
                case _:
                    stream = client.stream(**wanted)
                    async for _ in stream:
                        break
                    await stream.aclose()
                    self.early["stream left"] += 1

    async def _measure(self, interval: float, note: Note) -> None:
        libc = ctypes.CDLL(None)
        while True:
            # Memory that malloc keeps for later is not a leak. It can be trimmed only in this
            # process, not in workers.
            libc.malloc_trim(0)
            minute = (time.monotonic() - self.begun) / 60
            for name, pid in self._processes():
                with contextlib.suppress(psutil.NoSuchProcess):
                    process = psutil.Process(pid)
                    with process.oneshot():
                        memory = process.memory_info()
                        sample = Sample(
                            minute,
                            memory.rss / 1e6,
                            (memory.rss - memory.shared) / 1e6,
                            process.num_fds(),
                            process.num_threads(),
                        )
                    self.samples.setdefault(name, []).append(sample)
            driver = self.samples["driver"][-1]
            calls = sum(load.outcomes.answered for load in self.loads.values())
            note(
                f"minute {minute:.1f} of {self.minutes:g}: {calls:,} calls, "
                f"driver {driver.rss:.1f} MB, {driver.files} files"
            )
            await asyncio.sleep(interval)

    def _processes(self) -> list[tuple[str, int]]:
        servers = fork_server._servers.values()
        processes = [("driver", os.getpid())]
        processes += [(f"fork server ({server.preload})", server.process.pid) for server in servers]
        for name, client in self.clients.items():
            processes += [
                (f"{name} worker {w.id}, pid {w.pid}", w.pid)
                for w in client.workers
                if w.state == "ready"
            ]
        return processes

    def rows(self, warm_up: float) -> dict[str, dict[str, Any]]:
        """Return the figures of processes that lived from minute ``warm_up`` until near the end."""
        rows = {}
        last = max(samples[-1].minute for samples in self.samples.values())
        for name, samples in self.samples.items():
            warm = [sample for sample in samples if sample.minute >= warm_up]
            span = last - warm_up
            if len(warm) < 8 or warm[-1].minute - warm[0].minute < 0.8 * span:
                continue
            quarter = len(warm) // 4
            begin, end = warm[:quarter], warm[-quarter:]
            minutes = [sample.minute for sample in warm]
            slope = np.polyfit(minutes, [sample.rss for sample in warm], 1)[0]
            own = np.polyfit(minutes, [sample.own for sample in warm], 1)[0]
            rows[name] = {
                "rss_mb": [warm[0].rss, warm[-1].rss],
                "highest_rss_mb": max(sample.rss for sample in warm),
                "mb_per_minute": float(slope),
                # Pages of libraries do not count here, because they are read when their code first
                # runs.
                "own_mb_per_minute": float(own),
                # Use the minimum of a quarter, because updates and kills open files for a moment.
                "files": [min(sample.files for sample in part) for part in (begin, end)],
                "threads": [min(sample.threads for sample in part) for part in (begin, end)],
            }
        return rows


def growth(rows: dict[str, dict[str, Any]]) -> list[str]:
    """Describe processes with more open files or threads at the end than at the beginning."""
    return [
        f"{name}: {what} grew from {row[what][0]} to {row[what][1]}"
        for name, row in rows.items()
        for what in ("files", "threads")
        if row[what][1] > row[what][0] + _SLACK
    ]


async def soak(note: Note, *, minutes: float, sglang: bool) -> dict[str, Any]:
    """Run the pools, and return the figures of their processes."""
    running = Soak(POOLS if sglang else POOLS[:1], minutes, 0)
    await running.run(_INTERVAL_SECONDS, note)
    warm_up = minutes / 5
    rows = running.rows(warm_up)
    outcomes = {name: load.outcomes for name, load in running.loads.items()}
    return {
        "minutes": minutes,
        "warm_up": warm_up,
        "processes": rows,
        "grown": growth(rows),
        "calls": msgspec.to_builtins(outcomes),
        "flawless": all(outcome.flawless for outcome in outcomes.values()),
        "faults": {name: len(striker.strikes) for name, striker in running.strikers.items()},
        "weight_updates": running.updates,
        "left_early": dict(running.early),
        "samples": {name: running.samples[name] for name in rows},
    }


def main(
    minutes: Annotated[float, typer.Option(min=0.05, help="Length.")] = 20.0,
    sglang: Annotated[
        bool, typer.Option(help="With a pool of real engines beside the fake.")
    ] = True,
    json: Json = None,
) -> None:
    """Measure memory, open files and threads of driver and workers over a long time."""
    report = Report("soak", json)
    plan = {"soak": partial(soak, minutes=minutes, sglang=sglang)}
    result = report.measure(plan, limit=60 * minutes + 600).get("soak")
    if result:
        _print(report, result)
    ok = result is not None and result["processes"] and result["flawless"] and not result["grown"]
    report.finish(ok=bool(ok), **(result or {}))


def _print(report: Report, result: dict[str, Any]) -> None:
    rows = result["processes"]
    report.table(
        f"{result['minutes']:g} minutes, the first {result['warm_up']:g} not counted",
        ("", "RSS MB first", "last", "highest", "MB/min", "of it own", "files", "threads"),
        [
            (
                name,
                *(f"{mb:.1f}" for mb in (*row["rss_mb"], row["highest_rss_mb"])),
                f"{row['mb_per_minute']:+.3f}",
                f"{row['own_mb_per_minute']:+.3f}",
                "{} .. {}".format(*row["files"]),
                "{} .. {}".format(*row["threads"]),
            )
            for name, row in rows.items()
        ],
    )
    for name, calls in result["calls"].items():
        report.lines(
            f"{name}: {number(calls['answered'])} calls answered, {calls['lost']} lost, "
            f"{calls['duplicated']} duplicated, {calls['wrong']} wrong; "
            f"{result['faults'][name]} faults",
            *(f"  {count} x {text}" for text, count in calls["reasons"].items()),
        )
    left = ", ".join(f"{count} {how}" for how, count in result["left_early"].items())
    report.lines(f"weight updates: {result['weight_updates']}; callers who left early: {left}")
    report.lines(*result["grown"])
    driver = rows.get("driver", {}).get("mb_per_minute")
    workers = [row["mb_per_minute"] for name, row in rows.items() if "worker" in name]
    worst = max(workers, default=None)
    report.target("driver, RSS MB/min", 0.1, driver, at_most=True)
    report.target("workers, RSS MB/min, worst", 0.1, worst, at_most=True)
    report.target("processes with more files or threads", 0, len(result["grown"]), at_most=True)


if __name__ == "__main__":
    typer.run(main)
