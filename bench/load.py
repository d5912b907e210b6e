"""Closed-loop load: n callers. A caller makes its next call when its last call is answered.

Also the clocks that every bench reads: time, CPU time and percentiles.
"""

from __future__ import annotations

import asyncio
import gc
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import psutil

from .parts import Note

Call = Callable[[int], Awaitable[Any]]
"""``call(i)`` makes the i-th call. Awaiting the result gives the answer."""

WARM_SECONDS = 0.3
_GC_THRESHOLDS = (50_000, 20, 100)


class LoadPlan(NamedTuple):
    """Repetitions of a closed loop: their length, their number, and the calls in flight."""

    seconds: float
    repeats: int
    levels: tuple[int, ...]


def settle_collector() -> None:
    """Set the garbage collector as ``sglrl.rollout`` advises. The bench does so for every system.

    Thousands of calls or agents are some hundred thousand objects. With Python's own thresholds the
    collector walks them again and again, and each full collection walks all objects of the imports.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)


class Window(NamedTuple):
    """Counts between two moments under load.

    Attributes:
        seconds: length of the window.
        cpu_seconds: CPU time of all threads of this process.
        loop_seconds: CPU time of the event loop's thread.
        latencies: seconds of each call, if recorded.
    """

    calls: int
    seconds: float
    cpu_seconds: float
    loop_seconds: float
    latencies: Sequence[float] = ()

    @property
    def rate(self) -> float:
        return self.calls / self.seconds

    @property
    def cpu_us(self) -> float:
        """CPU time of this process per call, in microseconds."""
        return self.cpu_seconds / self.calls * 1e6

    @property
    def loop_us(self) -> float:
        """CPU time of the event loop's thread per call, in microseconds. One core must spend it."""
        return self.loop_seconds / self.calls * 1e6


class Clocks:
    """The clocks of this process and of the event loop's thread, which makes this object."""

    def __init__(self) -> None:
        self._begun = self._read()

    def window(self, calls: int, latencies: Sequence[float] = ()) -> Window:
        """Return what has passed since this object was made."""
        passed = [now - begun for now, begun in zip(self._read(), self._begun, strict=True)]
        return Window(calls, *passed, tuple(latencies))

    @staticmethod
    def _read() -> tuple[float, float, float]:
        return time.perf_counter(), time.process_time(), time.thread_time()


def cpu_seconds(process: psutil.Process) -> float:
    """Return the user and system seconds of a process, without its children."""
    times = process.cpu_times()
    return float(times.user + times.system)


def percentile(latencies: Sequence[float], percent: float) -> float:
    return float(np.percentile(np.asarray(latencies), percent))


async def closed_loop(
    call: Call, in_flight: int, seconds: float, repeats: int, *, record: bool = False
) -> list[Window]:
    """Return ``repeats`` windows of ``seconds`` under constant load, after a warm-up.

    A window ends later if no call has been answered in it. Latencies are recorded only with
    ``record``, because reading the clock twice adds to the cost.
    """
    settle_collector()
    count = 0
    running = True
    latencies: list[float] = []
    clock = time.perf_counter

    async def caller() -> None:
        nonlocal count
        while running:
            count = i = count + 1
            await call(i)

    async def timed_caller() -> None:
        nonlocal count
        while running:
            count = i = count + 1
            begun = clock()
            await call(i)
            latencies.append(clock() - begun)

    windows = []
    async with asyncio.TaskGroup() as group:
        for _ in range(in_flight):
            group.create_task(timed_caller() if record else caller())
        await asyncio.sleep(min(seconds, WARM_SECONDS))
        for _ in range(repeats):
            latencies.clear()
            before, clocks = count, Clocks()
            await asyncio.sleep(seconds)
            while count == before:  # noqa: ASYNC110
                await asyncio.sleep(seconds)
            # In a steady state, as many calls begin as end.
            windows.append(clocks.window(count - before, latencies))
        running = False
    return windows


def rate_summary(windows: Sequence[Window]) -> dict[str, float]:
    """Return medians over the windows. ``lowest`` and ``highest`` show how steady the rate was."""
    rates = [w.rate for w in windows]
    return {
        "rate": statistics.median(rates),
        "lowest": min(rates),
        "highest": max(rates),
        "cpu_us": statistics.median(w.cpu_us for w in windows),
        "loop_us": statistics.median(w.loop_us for w in windows),
    }


async def latency_and_rates(call: Call, load: LoadPlan, note: Note) -> dict[str, Any]:
    """Measure the latency at 1 in flight, then the rate at each level.

    Figures are medians over the windows: CPU time a call and percentiles in microseconds.
    """
    note("latency at 1 in flight")
    windows = await closed_loop(call, 1, load.seconds, load.repeats, record=True)
    latency = {
        f"p{percent}_us": statistics.median(percentile(w.latencies, percent) * 1e6 for w in windows)
        for percent in (50, 99)
    }
    summary = rate_summary(windows)
    latency |= {name: summary[name] for name in ("cpu_us", "loop_us")}
    rates = {}
    for level in load.levels:
        note(f"{level} in flight")
        rates[str(level)] = rate_summary(await closed_loop(call, level, load.seconds, load.repeats))
    return {"latency": latency, "rates": rates}
