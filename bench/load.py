"""The closed-loop load of the benches, and the clocks that they read.

In a closed loop, each of n callers makes its next call when its previous call is answered.
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
"""A function ``call(i)`` that makes the i-th call. Its result is an awaitable of the answer."""

WARM_SECONDS = 0.3
_GC_THRESHOLDS = (50_000, 20, 100)


class LoadPlan(NamedTuple):
    """The repetitions of a closed loop.

    Attributes:
        seconds: length of one repetition.
        repeats: number of repetitions.
        levels: the numbers of calls in flight at which the rate is measured.
    """

    seconds: float
    repeats: int
    levels: tuple[int, ...]


def settle_collector() -> None:
    """Set the garbage collector as ``sglrl.rollout`` advises, whichever system is measured.

    Thousands of calls or agents consist of several hundred thousand objects. With Python's own
    thresholds, the collector walks these objects again and again. Each full collection also walks
    all objects that imports have made.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)


class Window(NamedTuple):
    """The figures of a period under load.

    Attributes:
        calls: number of calls that were answered.
        seconds: length of the period.
        cpu_seconds: CPU time of all threads of this process.
        loop_seconds: CPU time of the event loop's thread.
        latencies: the seconds that each call took, if recorded.
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
        """CPU time of the event loop's thread per call, in microseconds.

        The event loop runs on one core, so this time limits the rate.
        """
        return self.loop_seconds / self.calls * 1e6


class Clocks:
    """The clocks of this process and of the current thread, which must be the event loop's."""

    def __init__(self) -> None:
        self._begun = self._read()

    def window(self, calls: int, latencies: Sequence[float] = ()) -> Window:
        """Return the window since this object was made."""
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

    A window is longer if no call is answered within ``seconds``. Latencies are recorded only with
    ``record``, because reading the clock twice adds to the cost of a call.
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
            # ``count`` counts calls that begin. In a steady state, as many calls end.
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
    """Measure the latency with one call in flight, then the rate at each of ``load.levels``.

    The figures are medians over the windows, except ``lowest`` and ``highest``. CPU times per call
    and percentiles are in microseconds.
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
