"""Next-token distributions: sglrl with genlm's interface, and genlm-backend's own classes.

``python -m bench.genlm --json FILE`` runs 1 to 512 tasks. Each task extends its own prompt by one
token after the other, as genlm's inference does. The prompts share a prefix, or share nothing.
Peers need genlm-backend.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from sglrl.api.tiny_model import tiny_model

from .parts import PartFailed, run_part
from .report import (
    Target,
    console,
    describe,
    machine,
    number,
    print_targets,
    steps,
    table,
    write_json,
)

_SYSTEMS = {
    "sglrl": "sglrl",
    "genlm_sgl": "genlm AsyncSGLTransformer",
    "genlm_hf": "genlm AsyncTransformer",
}
_PREFIXES = ("shared", "disjoint")


def main(
    json: Annotated[Path | None, typer.Option(help="Write all figures there.")] = None,
    model: Annotated[str | None, typer.Option(help="A model's folder; a tiny one is made.")] = None,
    vocab: Annotated[int, typer.Option(help="Vocabulary of the tiny model.")] = 512,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    concurrency: Annotated[list[int] | None, typer.Option(help="Tasks; repeatable.")] = None,
    seconds: Annotated[float, typer.Option(help="Least time of one measurement.")] = 1.5,
    prefix: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 32,
    new: Annotated[int, typer.Option(help="Tokens that a task appends.")] = 8,
    system: Annotated[list[str] | None, typer.Option(help="Only these; repeatable.")] = None,
) -> None:
    """Measure queries per second, and for how long the caller's event loop was blocked."""
    tasks = concurrency or [1, 8, 64, 512]
    folder = model or str(tiny_model(vocab_size=vocab))
    options = {
        "model": folder,
        "device": device,
        "tasks": tasks,
        "prefixes": _PREFIXES,
        "seconds": seconds,
        "prefix": prefix,
        "new": new,
    }
    info = machine()
    console.print(describe(info), markup=False)
    results: dict[str, dict[str, Any]] = {}
    names = system or list(_SYSTEMS)
    with steps(len(names)) as (begin, note):
        for name in names:
            begin(_SYSTEMS[name])
            try:
                results[name] = run_part("bench.genlm_parts", name, options, note, 1200.0)
            except PartFailed as failure:
                results[name] = {"failed": str(failure)}
                missing = "No module named" in str(failure)
                note(str(failure) if missing else f"{failure}\n{failure.log}")
    targets = []
    for kind in _PREFIXES:
        rows = []
        for count in tasks:
            found = {n: r.get(kind, {}).get(str(count), {}) for n, r in results.items()}
            ours = found.get("sglrl", {})
            peers = [found.get(n, {}).get("queries_per_s") for n in ("genlm_sgl", "genlm_hf")]
            speed = ours.get("queries_per_s")
            row = [str(count), number(speed), *map(number, peers)]
            row += [number(f.get("blocked_ms")) for f in found.values()]
            rows.append(row)
            best = max((p for p in peers if p), default=None)
            ratio = speed / best if speed and best else None
            asked = 3.0 if count == 64 else 1.0
            targets.append(Target(f"{kind}, {count}: times the best peer", asked, ratio, ""))
            targets.append(
                Target(
                    f"{kind}, {count}: loop blocked",
                    5.0,
                    ours.get("blocked_ms"),
                    "ms",
                    at_most=True,
                )
            )
        blocked = [f"blocked ms, {n}" for n in results]
        table(
            f"{kind} prefixes: queries/s, and the longest time that the loop was blocked",
            ("tasks", "sglrl", "genlm sgl", "genlm hf", *blocked),
            rows,
        )
    for name, result in results.items():
        if "failed" in result:
            console.print(f"{_SYSTEMS[name]}: {result['failed']}", markup=False)
    print_targets(targets)
    options["model"] = Path(folder).name
    document = {"bench": "genlm", "machine": info, "options": options, "systems": results}
    write_json(json, document, targets)
    if "failed" in results.get("sglrl", {}):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
