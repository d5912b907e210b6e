"""``python -m bench.soak``: find leaks under minutes of load.

Two pools run with kills, weight updates and callers who cancel early. The bench measures memory,
open files and threads of every process.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import itertools
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import psutil
import typer
import uvloop
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

import sglrl
from sglrl.driver import fork_server

from .fault_cases import CASES, FaultCase
from .fault_load import Load
from .fault_schedule import DROP, KILL, UPDATE, schedule
from .fault_strikes import Striker
from .faults_parts import weights_of, with_answers
from .report import Target, console, describe, machine, number, print_targets, table, write_json

_UPDATE_SECONDS = 20.0
_PAUSE_SECONDS = 0.2
"""Seconds between two calls of a caller. The pause keeps the machine usable for other work."""
_CACHE_TOKENS = 8192
"""Size of SGLang's prefix cache. The cache keeps objects for every answer until it is full, which
is not a leak. A cache of this size is full before the measurement counts."""
_SLACK = 2
"""Additional open files and threads that do not count as growth: an update may be running."""

POOLS = (
    CASES["fake"]._replace(replicas=4, in_flight=24, gap=10.0, shares={KILL: 3, DROP: 1}),
    CASES["sglang-cpu"]._replace(replicas=2, in_flight=4, gap=60.0, shares={KILL: 1, UPDATE: 1}),
)
"""Worker 0 of each pool is never struck, so it has the whole time to grow."""


class Look(NamedTuple):
    """One measurement of a process.

    Attributes:
        minute: minutes since the start.
        rss: resident memory in MB.
        own: resident memory in MB that no file backs.
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
        self.looks: dict[str, list[Look]] = {}
        self.loads: dict[str, Load] = {}
        self.strikers: dict[str, Striker] = {}
        self.clients: dict[str, sglrl.Client] = {}
        self.early: Counter[str] = Counter()
        self.updates = 0
        self.begun = 0.0

    async def run(self, interval: float, on_look: Callable[[float], None]) -> None:
        """Run the load.

        Args:
            interval: seconds between two measurements of all processes.
            on_look: called with the minute after each measurement.
        """
        async with contextlib.AsyncExitStack() as stack:
            running = [await stack.enter_async_context(self._pool(case)) for case in self.cases]
            self.begun = time.monotonic()
            async with asyncio.TaskGroup() as group:
                helpers = [group.create_task(self._look(interval, on_look))]
                tasks = []
                for case, weights in running:
                    load, striker = self.loads[case.name], self.strikers[case.name]
                    tasks.append(group.create_task(load.run()))
                    helpers.append(group.create_task(self._leave_early(case)))
                    if weights is not None:
                        helpers.append(group.create_task(self._update(case, weights)))
                    count = int(self.minutes * 60 / case.gap)
                    faults = schedule(self.seed, count, case.gap, case.shares)
                    helpers.append(group.create_task(striker.run(faults)))
                await asyncio.sleep(self.minutes * 60)
                for load in self.loads.values():
                    load.stop()
                for task in helpers:
                    task.cancel()
                await asyncio.wait(tasks)

    @contextlib.asynccontextmanager
    async def _pool(self, case: FaultCase) -> AsyncIterator[tuple[FaultCase, Any]]:
        model, weights, update = "fake", None, None
        arguments = case.arguments()
        if not case.is_fake:
            arguments["max_total_tokens"] = _CACHE_TOKENS
            from sglrl.api.tiny_model import tiny_model

            model = str(tiny_model())
            weights = weights_of(model)
        async with sglrl.launch(
            model,
            replicas=case.replicas,
            restarts=10**9,
            hang_timeout=case.hang_timeout,
            **arguments,
        ) as client:
            if weights is not None:

                async def update() -> None:
                    await client.update_weights(weights)

            prompts, answers = await with_answers(case, client, self.seed)
            load = Load(
                client,
                prompts,
                answers,
                in_flight=case.in_flight,
                tolerance=case.tolerance,
                pause=_PAUSE_SECONDS,
            )
            self.clients[case.name] = client
            self.loads[case.name] = load
            self.strikers[case.name] = Striker(
                client, load, among=range(1, case.replicas), update=update
            )
            yield case, weights

    async def _update(self, case: FaultCase, weights: Any) -> None:
        while True:
            await asyncio.sleep(_UPDATE_SECONDS)
            with contextlib.suppress(sglrl.WeightUpdateError, sglrl.WorkerLost):
                await self.clients[case.name].update_weights(weights)
                self.updates += 1

    async def _leave_early(self, case: FaultCase) -> None:
        """Make calls and do not wait for their answers. The pool must not keep their requests."""
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

    async def _look(self, interval: float, on_look: Callable[[float], None]) -> None:
        libc = ctypes.CDLL(None)
        while True:
            # Memory that malloc keeps for later is no leak of the driver. Workers cannot trim it.
            libc.malloc_trim(0)
            minute = (time.monotonic() - self.begun) / 60
            for name, pid in self._processes():
                with contextlib.suppress(psutil.NoSuchProcess):
                    process = psutil.Process(pid)
                    with process.oneshot():
                        memory = process.memory_info()
                        look = Look(
                            minute,
                            memory.rss / 1e6,
                            (memory.rss - memory.shared) / 1e6,
                            process.num_fds(),
                            process.num_threads(),
                        )
                    self.looks.setdefault(name, []).append(look)
            on_look(minute)
            await asyncio.sleep(interval)

    def _processes(self) -> list[tuple[str, int]]:
        servers = fork_server._servers.values()
        found = [("driver", os.getpid())]
        found += [(f"fork server ({server.preload})", server.process.pid) for server in servers]
        for name, client in self.clients.items():
            found += [
                (f"{name} worker {w.id}, pid {w.pid}", w.pid)
                for w in client.workers
                if w.state == "ready"
            ]
        return found

    def rows(self, warm_up: float) -> dict[str, dict[str, Any]]:
        """Return figures of each process that lived from ``warm_up`` minutes until near the end."""
        found = {}
        last = max(looks[-1].minute for looks in self.looks.values())
        for name, looks in self.looks.items():
            warm = [look for look in looks if look.minute >= warm_up]
            span = last - warm_up
            if len(warm) < 8 or warm[-1].minute - warm[0].minute < 0.8 * span:
                continue
            quarter = len(warm) // 4
            begin, end = warm[:quarter], warm[-quarter:]
            minutes = [look.minute for look in warm]
            slope = np.polyfit(minutes, [look.rss for look in warm], 1)[0]
            own = np.polyfit(minutes, [look.own for look in warm], 1)[0]
            found[name] = {
                "rss_mb": [warm[0].rss, warm[-1].rss],
                "highest_rss_mb": max(look.rss for look in warm),
                "mb_per_minute": float(slope),
                # Pages of libraries do not count here: they are read when their code first runs.
                "own_mb_per_minute": float(own),
                # Take the minimum of a quarter: an update or a kill opens some for a moment.
                "files": [min(look.files for look in part) for part in (begin, end)],
                "threads": [min(look.threads for look in part) for part in (begin, end)],
            }
        return found


def growth(rows: dict[str, dict[str, Any]]) -> list[str]:
    """Describe processes with more open files or threads at the end than at the beginning."""
    return [
        f"{name}: {what} grew from {row[what][0]} to {row[what][1]}"
        for name, row in rows.items()
        for what in ("files", "threads")
        if row[what][1] > row[what][0] + _SLACK
    ]


def main(
    minutes: Annotated[float, typer.Option(min=0.05, help="Length.")] = 20.0,
    warm_up: Annotated[
        float | None, typer.Option(help="Minutes that do not count; a fifth by default.")
    ] = None,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 5.0,
    sglang: Annotated[
        bool, typer.Option(help="With a pool of real engines beside the fake.")
    ] = True,
    seed: Annotated[int, typer.Option(help="Of prompts and kills.")] = 0,
    json: Annotated[Path | None, typer.Option(help="Write all figures to this file.")] = None,
) -> None:
    """Measure memory, open files and threads of driver and workers over a long time."""
    info = machine()
    warm_up = minutes / 5 if warm_up is None else warm_up
    soak = Soak(POOLS if sglang else POOLS[:1], minutes, seed)
    errors = Console(stderr=True)
    columns = (TextColumn("soak"), BarColumn(), TextColumn("{task.description}"))
    with Progress(*columns, TimeElapsedColumn(), console=errors) as progress:
        task = progress.add_task("starting", total=minutes)

        told = 0

        def show(minute: float) -> None:
            nonlocal told
            driver = soak.looks["driver"][-1]
            calls = sum(load.books.answered for load in soak.loads.values())
            text = f"{calls:,} calls, driver {driver.rss:.1f} MB, {driver.files} files"
            progress.update(task, completed=minute, description=text)
            if not errors.is_terminal and minute >= told:
                errors.print(f"minute {told} of {minutes:g}: {text}", highlight=False)
                told += 1

        uvloop.run(soak.run(interval, show))

    rows = soak.rows(warm_up)
    grown = growth(rows)
    console.print(describe(info))
    table(
        f"{minutes:g} minutes, the first {warm_up:g} not counted",
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
    books = {name: load.books for name, load in soak.loads.items()}
    kills = {name: len(striker.strikes) for name, striker in soak.strikers.items()}
    for name, book in books.items():
        console.print(
            f"{name}: {number(book.answered)} calls answered, {book.lost} lost, "
            f"{book.duplicated} duplicated, {book.wrong} wrong; {kills[name]} faults",
            markup=False,
        )
        for text, count in book.reasons.items():
            console.print(f"  {count} x {text}", markup=False)
    left = ", ".join(f"{count} {how}" for how, count in soak.early.items())
    console.print(f"weight updates: {soak.updates}; callers who left early: {left}", markup=False)
    for text in grown:
        console.print(text, markup=False)
    driver = rows.get("driver", {}).get("mb_per_minute")
    workers = [row["mb_per_minute"] for name, row in rows.items() if "worker" in name]
    targets = [
        Target("driver, RSS MB/min", 0.1, driver, "", at_most=True),
        Target("workers, RSS MB/min, worst", 0.1, max(workers, default=None), "", at_most=True),
        Target("processes with more files or threads", 0, len(grown), "", at_most=True),
    ]
    print_targets(targets)
    document = {
        "bench": "soak",
        "machine": info,
        "minutes": minutes,
        "warm_up": warm_up,
        "processes": rows,
        "grown": grown,
        "calls": {
            name: {
                k: getattr(b, k) for k in ("submitted", "answered", "lost", "duplicated", "wrong")
            }
            for name, b in books.items()
        },
        "faults": kills,
        "weight_updates": soak.updates,
        "left_early": dict(soak.early),
        "looks": {name: soak.looks[name] for name in rows},
    }
    write_json(json, document, targets)
    if grown or not rows or not all(book.flawless for book in books.values()):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
