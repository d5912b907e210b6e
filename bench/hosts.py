"""``python -m bench.hosts``: a pool on three hosts under load, with faults of hosts and links.

The hosts are network namespaces of this machine, joined by a bridge, so this needs root. Links
break for a short or a long time or in one direction, nodes and workers are killed, and the program
itself is stopped. The bench reports the outcome of every call.
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
    table,
    write_json,
)

_PARTS = "bench.hosts_parts"


def main(
    json: Annotated[Path | None, typer.Option(help="Write all figures to this file.")] = None,
    faults: Annotated[int, typer.Option(min=1, help="How many.")] = 200,
    gap: Annotated[float, typer.Option(min=0.1, help="Seconds between them, on average.")] = 3.0,
    in_flight: Annotated[int, typer.Option(min=1, help="Callers.")] = 24,
    seed: Annotated[int, typer.Option(help="Of the schedule and the prompts.")] = 0,
    delay: Annotated[
        float, typer.Option(min=0, help="Milliseconds that each packet takes longer.")
    ] = 0.0,
    loss: Annotated[float, typer.Option(min=0, max=50, help="Percent of packets lost.")] = 0.0,
    limit: Annotated[float, typer.Option(help="Seconds that this may take.")] = 3600.0,
) -> None:
    """Inject faults of hosts under load: count lost, duplicated and wrong calls."""
    info = machine()
    options = {
        "faults": faults,
        "gap": gap,
        "in_flight": in_flight,
        "seed": seed,
        "delay": delay / 1000,
        "loss": loss / 100,
    }
    console.print(describe(info))
    try:
        found = run_part(_PARTS, "faults", options, print_note, limit)
    except PartFailed as failure:
        print_note(f"not measured: {failure}\n{failure.log}")
        raise typer.Exit(1) from None
    _print(found)
    targets = [
        Target("faults", faults, sum(found["faults"].values()), ""),
        *(
            Target(f"calls {what}", 0, found[what], "", at_most=True)
            for what in ("lost", "duplicated", "wrong")
        ),
    ]
    print_targets(targets)
    write_json(
        json, {"bench": "hosts", "machine": info, "options": options, "result": found}, targets
    )
    if not found["flawless"]:
        raise typer.Exit(1)


def _print(found: dict[str, Any]) -> None:
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(found["faults"].items()))
    rows = [
        ("calls submitted", number(found["submitted"])),
        ("  lost", number(found["lost"])),
        ("  duplicated", number(found["duplicated"])),
        ("  wrong", number(found["wrong"])),
        ("calls that another worker went on with", number(found["resumed"])),
        ("tokens generated", number(found["tokens"])),
    ]
    table(f"three hosts, {found['seconds']:.0f} s, faults: {kinds}", ("", ""), rows)
    for text, count in found["reasons"].items():
        console.print(f"{count} x {text}", markup=False)
    for text in found["troubles"]:
        console.print(text, markup=False)


if __name__ == "__main__":
    typer.run(main)
