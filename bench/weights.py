"""``python -m bench.weights``: measure how long new weights take to reach running engines.

The bench also measures how long decoding stops meanwhile. It compares our update, a bare broadcast
of the same bytes, and SGLang's own ways to update weights, in one run.
"""

from __future__ import annotations

import itertools
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from . import weights_parts
from .cases import Case
from .parts import Part
from .report import Json, Report, extent, ratio
from .weights_parts import CASES, MODES, PHASES

CaseName = StrEnum("CaseName", {name: name for name in CASES})  # type: ignore[misc]
ModeName = StrEnum("ModeName", {name: name for name in MODES})  # type: ignore[misc]
_WAYS = ("one request", "flattened 512 MB", "per parameter")
_ENV = {"NCCL_CUMEM_ENABLE": "0"}
_TORCHRL = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", **_ENV}
"""The environment variables that TorchRL's weight-sync scheme sets on both sides."""
_TARGETS_MS = {"0.6b": 12, "8b": 60, "32b": 240}
"""Milliseconds allowed for an update while decoding."""
_BARE = "bare broadcast"
_ENGINE, _HTTP, _AS_TORCHRL = "SGLang Engine", "SGLang HTTP", "TorchRL's settings"


def main(
    case: Annotated[
        list[CaseName], typer.Option(help="tiny-cpu needs no GPU, the others two; repeatable.")
    ] = [CaseName["tiny-cpu"]],  # noqa: B006
    json: Json = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Write a timeline of one update (PNG) to this file; one a case."),
    ] = None,
    replicas: Annotated[int, typer.Option(min=1, help="Engines that receive.")] = 1,
    tp_size: Annotated[int, typer.Option(min=1, help="GPUs of each.")] = 1,
    updates: Annotated[
        int | None, typer.Option(min=1, help="Updates of each kind; the median counts.")
    ] = None,
    mode: Annotated[
        list[ModeName] | None,
        typer.Option(help="kept: the copy in the host's memory, too; repeatable."),
    ] = None,
    peers: Annotated[bool, typer.Option(help="Measure SGLang's own ways too (on GPUs).")] = True,
) -> None:
    """Measure end-to-end time and pause of a weight update."""
    report = Report("weights", json)
    receivers = replicas * tp_size
    measured = {}
    for name in case:
        one = CASES[name.value]
        one = one._replace(repeats=updates or one.repeats)
        pool = {
            "replicas": replicas,
            "tp_size": tp_size,
            "modes": [m.value for m in mode or ModeName],
        }
        systems = report.measure(
            {"sglrl": partial(weights_parts.sglrl, case=one, **pool)}, env=_ENV, of=f"{name}: "
        )
        if systems:
            ours = systems["sglrl"]
            metadata = ours.pop("metadata")
            bare = partial(weights_parts.bare, case=one, receivers=receivers, size=ours["bytes"])
            given = {"case": one, "metadata": metadata, "ways": _WAYS}
            plan: dict[str, Part] = {_BARE: bare}
            if peers and one.on_gpu:
                plan[_ENGINE] = partial(weights_parts.sglang_engine, **given)
                plan[_HTTP] = partial(weights_parts.sglang_http, **given)
            systems |= report.measure(plan, env=_ENV, of=f"{name}: ")
            if peers and one.on_gpu:
                given["ways"] = _WAYS[:1]
                plan = {_AS_TORCHRL: partial(weights_parts.sglang_engine, **given)}
                systems |= report.measure(plan, env=_TORCHRL, of=f"{name}: ")
            _print(report, one, systems, receivers)
        _compare(report, one, systems)
        if plot is not None:
            file = plot if len(case) == 1 else plot.with_stem(f"{plot.stem}-{name}")
            _plot(file, one, systems)
        measured[one.name] = {**one._asdict(), "systems": systems}
    report.finish(replicas=replicas, tp_size=tp_size, cases=measured)


def _print(report: Report, case: Case, systems: dict[str, Any], receivers: int) -> None:
    ours = systems["sglrl"]
    rows: list[tuple[str, dict[str, Any]]] = [
        (f"sglrl, {name} ({result['mode']})", result) for name, result in ours["modes"].items()
    ]
    if _BARE in systems:
        rows.append((_BARE, {"pause_ms": 0.0, **systems[_BARE]}))
    for system in (_ENGINE, _HTTP, _AS_TORCHRL):
        rows += [(f"{system}, {way}", r) for way, r in systems.get(system, {}).items()]
    report.table(
        f"{case.name}: {ours['bytes'] / 1e6:,.1f} MB to {receivers} worker(s), "
        f"{case.in_flight} requests decoding",
        ("", "ms", "lowest .. highest", "pause ms", "GB/s", *PHASES),
        [
            (
                name,
                result["total_ms"],
                extent(result["all_total_ms"]),
                result.get("pause_ms", result["total_ms"]),
                ours["bytes"] / result["total_ms"] / 1e6,
                *(result.get(f"{phase}_ms") for phase in PHASES),
            )
            for name, result in rows
        ],
    )
    report.lines(
        f"forming the group took {ours['join_ms']:.0f} ms, the first update after that "
        f"{ours['first_ms']:.0f} ms"
    )


def _compare(report: Report, case: Case, systems: dict[str, Any]) -> None:
    modes = systems.get("sglrl", {}).get("modes", {})

    def measured(mode: str, figure: str) -> float | None:
        return modes.get(mode, {}).get(figure)

    def at_most(name: str, asked: float, figure: float | None) -> None:
        report.target(f"{case.name}: {name}", asked, figure, "ms", at_most=True)

    total = measured("decoding", "total_ms")
    if case.name in _TARGETS_MS:
        at_most("update while decoding", _TARGETS_MS[case.name], total)
    if case.name == "8b":
        at_most("update with a pause", 50, measured("paused", "total_ms"))
        at_most("pause while decoding", 10, measured("decoding", "pause_ms"))
        for system, way, asked in (
            (_ENGINE, "per parameter", 20),
            (_HTTP, "per parameter", 20),
            (_AS_TORCHRL, "one request", 30),
        ):
            peer = systems.get(system, {}).get(way, {}).get("total_ms")
            report.target(f"{case.name}: times {system}, {way}", asked, ratio(peer, total))


def _plot(path: Path, case: Case, systems: dict[str, dict[str, Any]]) -> None:
    """Plot the decode steps of one request against the phases of one update."""
    timeline = systems.get("sglrl", {}).get("modes", {}).get("decoding", {}).get("timeline")
    if not timeline:
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    tokens = timeline["tokens_ms"]
    figure, axes = pyplot.subplots(figsize=(10, 4))
    gaps = [b - a for a, b in itertools.pairwise(tokens)]
    axes.bar(tokens[:-1], gaps, width=gaps, align="edge", color="#4c72b0", edgecolor="white")
    colors = {"prepare": "#dd8452", "stage": "#55a868", "commit": "#c44e52"}
    for name, start, end in timeline["phases"]:
        axes.axvspan(
            start, end, alpha=0.25, color=colors[name], label=f"{name} {end - start:.1f} ms"
        )
    axes.set_xlabel("ms since the call of update_weights")
    axes.set_ylabel("ms between two tokens of a request")
    axes.set_title(f"{case.name}: decode steps around one weight update")
    axes.legend(loc="upper right")
    figure.tight_layout()
    figure.savefig(path if path.suffix else path.with_suffix(".png"), dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    typer.run(main)
