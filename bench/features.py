"""``python -m bench.features``: what adapters, masks, sleep and starts cost on a GPU."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from .cases import CASES, engine_arguments, environment, model_folder
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

CaseName = Enum("CaseName", {name: name for name in CASES})  # type: ignore[misc]
PartName = Enum("PartName", {name: name for name in ("lora", "masks", "sleep", "start")})  # type: ignore[misc]

_DEFAULT = CaseName("8b")
_TARGETS = {
    # name in the part's result: what it is, target, unit
    "start_second_s": ("start of a second worker, with two GPUs", 12, "s"),
    "start_replacement_s": ("start of a replacement", 8, "s"),
    "lora_replace_ms": ("replace an adapter of rank 32", 30, "ms"),
    "sleep_first_kept_s": ("sleep, weights kept, first time", 1, "s"),
    "sleep_kept_s": ("sleep, weights kept", 1, "s"),
    "sleep_kept_wake_s": ("wake, weights kept", 1, "s"),
    "sleep_lost_s": ("sleep, weights lost", 0.1, "s"),
    "sleep_lost_wake_s": ("wake, weights lost", 0.3, "s"),
    "sleep_kept_left_mib": ("memory left, weights kept", 1500, "MiB"),
    "sleep_lost_left_mib": ("memory left, weights lost", 1500, "MiB"),
}


def main(
    case: Annotated[CaseName, typer.Option(help="Model and load.")] = _DEFAULT,
    part: Annotated[
        list[PartName] | None, typer.Option(help="What to measure; repeatable. Everything.")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write all figures to this file.")] = None,
    limit: Annotated[float, typer.Option(help="Seconds one part may take.")] = 300.0,
) -> None:
    """Measure features of engines that need a GPU to be measured."""
    one = CASES[case.value]
    info, found, failed = machine(), dict[str, Any](), dict[str, str]()
    parts = [p.value for p in part or PartName]
    with steps(len(parts)) as (begin, note):
        for name in parts:
            begin(name)
            options = {
                "case": one,
                "model": str(model_folder(one)),
                "arguments": engine_arguments(one, {}),
            }
            try:
                found |= run_part(
                    "bench.features_parts", name, options, note, limit, environment(one)
                )
            except PartFailed as failure:
                failed[name] = str(failure)
                print_note(f"{name} failed: {failure}\n{failure.log}")
    console.print(describe(info))
    table(f"features, {one.name}", ("figure", ""), [(k, number(v)) for k, v in found.items()])
    targets = [
        Target(title, asked, found.get(name), unit, at_most=True)
        for name, (title, asked, unit) in _TARGETS.items()
        if name.partition("_")[0] in parts and one.device == "cuda"
    ]
    if targets:
        print_targets(targets)
    write_json(json, {"machine": info, "case": one.name, "figures": found}, targets)
    raise typer.Exit(bool(failed))


if __name__ == "__main__":
    typer.run(main)
