"""``python -m bench.scale``: measure the cost of a call in a program with many nodes and workers.

Nodes and workers are simulated. They have the connections and messages of real ones, and answer
every call at once. The figure is the CPU time of the program, so it depends little on the cores
that the simulation uses.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Annotated, Any

import typer

import sglrl

from .fake_pool import fake_pool, generate_calls
from .load import LoadPlan, closed_loop, rate_summary
from .parts import ROOT, Note
from .report import Json, Report

_WORKERS = 8
_LEVELS = (512, 4096)
_TIMES = 2.0
"""The cost of a call with the most nodes may be this many times the cost with the fewest."""
_NODES_PER_PROCESS = 16


def main(
    json: Json = None,
    nodes: Annotated[
        list[int] | None, typer.Option(min=1, help="Repeatable; 1, 8 and 64 by default.")
    ] = None,
    seconds: Annotated[float, typer.Option(help="Length of one repetition.")] = 2.0,
    repeats: Annotated[int, typer.Option(min=1, help="Repetitions; the median counts.")] = 5,
) -> None:
    """Measure the cost of a call with simulated nodes."""
    report = Report("scale", json)
    counts = sorted(nodes or (1, 8, 64))
    load = LoadPlan(seconds, repeats, _LEVELS)
    plan = {f"{count} nodes": partial(measure, nodes=count, load=load) for count in counts}
    measured = report.measure(plan)
    results = {n: measured[f"{n} nodes"] for n in counts if f"{n} nodes" in measured}
    report.table(
        "cost of a call for the program",
        ("", "in flight", "us of the loop a call", "us of all threads", "calls/s"),
        [
            (
                f"{count} nodes, {count * _WORKERS} workers",
                str(level),
                *(figures[str(level)][figure] for figure in ("loop_us", "cpu_us", "rate")),
            )
            for count, figures in results.items()
            for level in _LEVELS
        ],
    )
    first, last = counts[0], counts[-1]
    if first in results and last in results and first < last:
        for level in _LEVELS:
            more, one = (results[count][str(level)]["loop_us"] for count in (last, first))
            name = f"cost of a call at {level}: {last} nodes, times that of {first}"
            report.target(name, _TIMES, more / one, at_most=True)
    options = {"workers": _WORKERS, "seconds": seconds, "repeats": repeats}
    report.finish(options=options, results=results)


async def measure(note: Note, *, nodes: int, load: LoadPlan) -> dict[str, Any]:
    """Return the cost of a call in this program, with a number of simulated nodes."""
    note(f"starting {nodes} nodes")
    begun = time.perf_counter()
    async with (
        sglrl.Hosts("tcp://127.0.0.1:*", at_least=nodes) as hosts,
        _simulated(hosts.address, nodes),
        fake_pool(
            hosts=hosts, replicas=nodes * _WORKERS, window=max(load.levels), progress=False
        ) as client,
    ):
        figures: dict[str, Any] = {"start_seconds": time.perf_counter() - begun}
        call = generate_calls(client)
        for level in load.levels:
            note(f"{level} in flight")
            windows = await closed_loop(call, level, load.seconds, load.repeats)
            figures[str(level)] = rate_summary(windows)
        return figures


@contextlib.asynccontextmanager
async def _simulated(address: str, nodes: int) -> AsyncIterator[None]:
    """Run processes that simulate a number of nodes, while the block runs."""
    counts = [min(_NODES_PER_PROCESS, nodes - done) for done in range(0, nodes, _NODES_PER_PROCESS)]
    command = (sys.executable, "-m", "bench.scale_nodes", address)
    processes = [
        await asyncio.create_subprocess_exec(
            *command, str(count), cwd=ROOT, stdin=asyncio.subprocess.PIPE
        )
        for count in counts
    ]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            await process.wait()


if __name__ == "__main__":
    typer.run(main)
