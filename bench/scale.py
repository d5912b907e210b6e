"""``python -m bench.scale``: what a call costs the program when it has many nodes and workers.

Nodes and workers are simulated: they have the connections and messages of real ones, and answer
every call at once. The figure is CPU time of the program, so the cores that the simulation uses do
not change it much.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from .parts import PartFailed, run_part
from .report import (
    Target,
    console,
    describe,
    machine,
    number,
    print_note,
    print_targets,
    steps,
    table,
    write_json,
)

_PARTS = "bench.scale_parts"
_LEVELS = (512, 4096)
_TIMES = 2.0
"""The cost of a call with many nodes may be this many times the cost with one."""


def main(
    json: Annotated[Path | None, typer.Option(help="Write all figures to this file.")] = None,
    nodes: Annotated[
        list[int] | None, typer.Option(min=1, help="Repeatable; 1, 8 and 64 by default.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Of each node.")] = 8,
    seconds: Annotated[float, typer.Option(help="Length of one repetition.")] = 2.0,
    repeats: Annotated[int, typer.Option(min=1, help="Repetitions; the median counts.")] = 5,
    limit: Annotated[
        float, typer.Option(help="Seconds that one number of nodes may take.")
    ] = 600.0,
) -> None:
    """Measure the cost of a call with simulated nodes."""
    info = machine()
    counts = sorted(nodes or (1, 8, 64))
    results: dict[int, dict[str, Any]] = {}
    with steps(len(counts)) as (begin, note):
        for count in counts:
            begin(f"{count} nodes")
            options = {
                "nodes": count,
                "workers": workers,
                "levels": _LEVELS,
                "seconds": seconds,
                "repeats": repeats,
            }
            try:
                results[count] = run_part(_PARTS, "scale", options, note, limit)
            except PartFailed as failure:
                print_note(f"{count} nodes failed: {failure}\n{failure.log}")

    console.print(describe(info))
    rows = [
        (
            f"{count} nodes, {count * workers} workers",
            str(level),
            *(number(found[str(level)][figure]) for figure in ("loop_us", "cpu_us", "rate")),
        )
        for count, found in results.items()
        for level in _LEVELS
    ]
    heads = ("", "in flight", "us of the loop a call", "us of all threads", "calls/s")
    table("cost of a call for the program", heads, rows)
    targets = []
    first, last = counts[0], counts[-1]
    if first in results and last in results and first < last:
        for level in _LEVELS:
            costs = [results[count][str(level)]["loop_us"] for count in (last, first)]
            name = f"cost of a call at {level}: {last} nodes, times that of {first}"
            targets.append(Target(name, _TIMES, costs[0] / costs[1], "", at_most=True))
    print_targets(targets)
    document = {
        "bench": "scale",
        "machine": info,
        "options": {"workers": workers, "seconds": seconds, "repeats": repeats},
        "results": {str(count): found for count, found in results.items()},
    }
    write_json(json, document, targets)
    if len(results) < len(counts):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
