"""``python -m bench.genlm``: measure queries for next-token distributions.

The bench compares sglrl with genlm's interface and genlm-backend's own classes. It runs 1 to 512
tasks. Each task extends its own prompt by one token after the other, as genlm's inference does. The
prompts share a prefix, or share nothing. The peers need the package genlm-backend.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from sglrl.launching.tiny_model import tiny_model

from . import genlm_parts
from .genlm_parts import NEW_TOKENS, PREFIXES, PROMPT_TOKENS
from .report import Json, Report, ratio

_SYSTEMS = {
    "sglrl": genlm_parts.sglrl,
    "genlm_sgl": genlm_parts.genlm_sgl,
    "genlm_hf": genlm_parts.genlm_hf,
}
_PEERS = [title for title in _SYSTEMS if title != "sglrl"]


def main(
    json: Json = None,
    model: Annotated[str | None, typer.Option(help="A model's folder; a tiny one is made.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    concurrency: Annotated[list[int] | None, typer.Option(help="Tasks; repeatable.")] = None,
    seconds: Annotated[float, typer.Option(help="Shortest time of one measurement.")] = 1.5,
) -> None:
    """Measure queries per second, and for how long the caller's event loop was blocked."""
    report = Report("genlm", json)
    tasks = concurrency or [1, 8, 64, 512]
    folder = model or str(tiny_model())
    load = {"device": device, "tasks": tasks, "seconds": seconds}
    plan = {title: partial(part, model=folder, **load) for title, part in _SYSTEMS.items()}
    results = report.measure(plan, limit=1200.0)
    for kind in PREFIXES:
        rows = []
        for count in tasks:
            figures = {title: result[kind][str(count)] for title, result in results.items()}
            speeds = {title: one["queries_per_s"] for title, one in figures.items()}
            blocked = [one["blocked_ms"] for one in figures.values()]
            rows.append((str(count), *map(speeds.get, _SYSTEMS), *blocked))
            best = max((speeds[peer] for peer in _PEERS if peer in speeds), default=None)
            times = ratio(speeds.get("sglrl"), best)
            asked = 3.0 if count == 64 else 1.0
            report.target(f"{kind}, {count}: times the best peer", asked, times)
            ours = figures["sglrl"]["blocked_ms"] if "sglrl" in figures else None
            report.target(f"{kind}, {count}: loop blocked", 5.0, ours, "ms", at_most=True)
        report.table(
            f"{kind} prefixes: queries/s, and the longest time that the loop was blocked",
            ("tasks", *_SYSTEMS, *(f"blocked ms, {title}" for title in results)),
            rows,
        )
    options: dict[str, Any] = {**load, "model": Path(folder).name, "prefixes": PREFIXES}
    options |= {"prefix": PROMPT_TOKENS, "new": NEW_TOKENS}
    report.finish(may_fail=_PEERS, options=options, systems=results)


if __name__ == "__main__":
    typer.run(main)
