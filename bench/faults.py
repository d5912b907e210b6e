"""``python -m bench.faults``: a pool under load with repeated faults.

Workers are killed, stopped, slowed down and disconnected. The bench reports the outcome of every
call, and how long its caller had to wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .fault_cases import CASES, FaultCase
from .parts import Note, PartFailed, run_part
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

_PARTS = "bench.faults_parts"

CaseName = Enum("CaseName", {name: name for name in CASES})  # type: ignore[misc]


def main(
    case: Annotated[
        list[CaseName] | None,
        typer.Option(help="Repeatable; fake (no SGLang) and sglang-cpu by default."),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write all figures to this file.")] = None,
    faults: Annotated[
        int | None, typer.Option(min=0, help="How many; the case's own number by default.")
    ] = None,
    gap: Annotated[
        float | None, typer.Option(min=0, help="Seconds between them, on average.")
    ] = None,
    in_flight: Annotated[int | None, typer.Option(min=1, help="Callers.")] = None,
    seed: Annotated[int, typer.Option(help="Of the schedule and the prompts.")] = 0,
    limit: Annotated[float, typer.Option(help="Seconds one case may take.")] = 1800.0,
) -> None:
    """Inject faults under load: count lost, duplicated and wrong calls, and time the recovery."""
    cases = []
    for name in case or [name for name in CaseName if not CASES[name.value].on_gpus]:
        one = CASES[name.value]
        cases.append(
            one._replace(
                faults=one.faults if faults is None else faults,
                gap=one.gap if gap is None else gap,
                in_flight=in_flight or one.in_flight,
            )
        )
    info = machine()
    results: dict[str, dict[str, Any]] = {}
    for one in cases:
        options = {
            "case": one.name,
            "faults": one.faults,
            "gap": one.gap,
            "in_flight": one.in_flight,
            "seed": seed,
        }
        with _progress(one) as note:
            try:
                results[one.name] = run_part(_PARTS, "case", options, note, limit)
            except PartFailed as failure:
                results[one.name] = {"failed": str(failure)}
                print_note(f"{one.name} failed: {failure}\n{failure.log}")

    console.print(describe(info))
    targets: list[Target] = []
    for one in cases:
        found = results[one.name]
        if "failed" in found:
            console.print(f"{one.name}: not measured: {found['failed']}", markup=False)
            continue
        _print(one, found)
        targets += _targets(one, found)
    print_targets(targets)
    document = {
        "bench": "faults",
        "machine": info,
        "seed": seed,
        "cases": {c.name: c._asdict() | {"result": results[c.name]} for c in cases},
    }
    write_json(json, document, targets)
    if not all(found.get("flawless") for found in results.values()):
        raise typer.Exit(1)


@contextmanager
def _progress(case: FaultCase) -> Iterator[Note]:
    """Show a bar over a case's faults on stderr. Without a terminal, print a line now and then."""
    errors = Console(stderr=True)
    if not errors.is_terminal:
        print_note(case.name)
        last = -1

        def line(text: str) -> None:
            nonlocal last
            done = int(text.split()[0])
            if 20 * done // max(1, case.faults) != last:
                last = 20 * done // max(1, case.faults)
                print_note("  " + text)

        yield line
        return
    columns = (TextColumn("{task.fields[name]}"), BarColumn(), MofNCompleteColumn())
    text_column = TextColumn("{task.description}")
    with Progress(*columns, text_column, TimeElapsedColumn(), console=errors) as progress:
        task = progress.add_task("", total=case.faults, name=case.name)

        def show(text: str) -> None:
            done, _, rest = text.partition(" ")
            progress.update(task, completed=int(done), description=rest)

        yield show


def _print(case: FaultCase, found: dict[str, Any]) -> None:
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(found["faults"].items()))
    rows = [
        ("prompts / left out: no one right answer", f"{found['prompts']} / {found['left_out']}"),
        ("calls submitted", number(found["submitted"])),
        ("  answered exactly once, as without faults", number(_right(found))),
        ("  lost", number(found["lost"])),
        ("  duplicated", number(found["duplicated"])),
        ("  wrong", number(found["wrong"])),
        ("calls that another worker went on with", number(found["resumed"])),
        ("tokens generated", number(found["tokens"])),
        ("tokens computed again (prefill)", number(found["recomputed"])),
    ]
    if found["updates"] or found["updates_refused"]:
        refused = sum(found["updates_refused"].values())
        rows.append(("weight updates done / given up", f"{found['updates']} / {refused}"))
    title = f"{case.name}: {case.replicas} workers, {case.in_flight} callers"
    table(f"{title}, {found['seconds']:.0f} s, faults: {kinds}", ("", ""), rows)
    rows = []
    for figure, name in (
        ("first_ms", "first continued token"),
        ("stream_ms", "every stream's next token"),
        ("back_ms", "replacement ready"),
    ):
        for kind, spread in found[figure].items():
            if spread["count"]:
                values = (number(spread[k]) for k in ("count", "p50", "p99", "max"))
                rows.append((f"{kind}: {name}", *values))
    if rows:
        table("milliseconds from the fault until", ("", "count", "p50", "p99", "max"), rows)
    for text, count in [*found["reasons"].items(), *found["updates_refused"].items()]:
        console.print(f"{count} x {text}", markup=False)
    for text in found["troubles"]:
        console.print(text, markup=False)


def _right(found: dict[str, Any]) -> int:
    right: int = found["answered"] - found["duplicated"] - found["wrong"]
    return right


def _targets(case: FaultCase, found: dict[str, Any]) -> list[Target]:
    targets = [
        Target(f"{case.name}: faults", case.faults, sum(found["faults"].values()), ""),
        *(
            Target(f"{case.name}: calls {what}", 0, found[what], "", at_most=True)
            for what in ("lost", "duplicated", "wrong")
        ),
    ]
    if case.wait_target is not None:
        worst = found["first_ms"]["kill alone"].get("max")
        name = f"{case.name}: continued token after a SIGKILL, worst (kill alone)"
        targets.append(Target(name, case.wait_target, worst, "ms", at_most=True))
    if case.back_target is not None:
        worst = found["back_ms"]["kill alone"].get("max")
        name = f"{case.name}: full strength after a SIGKILL, worst (kill alone)"
        targets.append(Target(name, case.back_target, worst, "ms", at_most=True))
    return targets


if __name__ == "__main__":
    typer.run(main)
