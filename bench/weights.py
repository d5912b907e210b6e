"""``python -m bench.weights``: how long new weights take to reach running engines.

The bench also measures how long decoding stops meanwhile. It compares our update, the bare
broadcast of the same bytes and SGLang's own ways in one run.
"""

from __future__ import annotations

import itertools
from enum import Enum
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
from .weight_cases import CASES, WeightCase

_PARTS = "bench.weights_parts"
_MODES = ("decoding", "idle", "paused", "kept")
_PHASES = ("prepare", "broadcast", "stage", "commit")
_WAYS = ("one request", "flattened 512 MB", "per parameter")
_TORCHRL = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_CUMEM_ENABLE": "0"}
"""The settings of TorchRL's weight-sync scheme on both sides."""

_AS_TORCHRL = "TorchRL's settings"
_PART_OF = {
    "sglrl": "sglrl",
    "bare broadcast": "bare",
    "SGLang Engine": "engine",
    "SGLang HTTP": "http",
    _AS_TORCHRL: "engine",
}
_SGLANG = ("SGLang Engine", "SGLang HTTP", _AS_TORCHRL)

CaseName = Enum("CaseName", {name: name for name in CASES})  # type: ignore[misc]


def main(
    case: Annotated[
        list[CaseName], typer.Option(help="tiny-cpu needs no GPU, the others two; repeatable.")
    ] = [CaseName["tiny-cpu"]],  # noqa: B006
    json: Annotated[Path | None, typer.Option(help="Write all figures to this file.")] = None,
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
        list[str] | None,
        typer.Option(help="decoding, idle, paused, or kept in the host's memory; repeatable."),
    ] = None,
    peers: Annotated[bool, typer.Option(help="Measure SGLang's own ways too (on GPUs).")] = True,
    limit: Annotated[float, typer.Option(help="Seconds one system may take.")] = 240.0,
) -> None:
    """Measure end-to-end time and pause of a weight update."""
    cases = [CASES[c.value] for c in case]
    if updates is not None:
        cases = [c._replace(updates=updates) for c in cases]
    info = machine()
    receivers = replicas * tp_size
    results: dict[str, dict[str, Any]] = {}
    plan = [(c, s) for c in cases for s in _systems(c, peers)]
    with steps(len(plan)) as (begin, note):
        for one, system in plan:
            found = results.setdefault(one.name, {})
            begin(f"{one.name}: {system}")
            ours = found.get("sglrl", {})
            options = {
                "case": one,
                "replicas": replicas,
                "tp_size": tp_size,
                "gpus": list(range(1, 1 + receivers)),
                "receivers": receivers,
                "modes": mode or _MODES,
                "ways": ["one request"] if system == _AS_TORCHRL else _WAYS,
                "bytes": ours.get("bytes"),
                "metadata": ours.get("metadata"),
            }
            part = _PART_OF[system]
            env = _TORCHRL if system == _AS_TORCHRL else {"NCCL_CUMEM_ENABLE": "0"}
            if part != "sglrl" and not ours.get("bytes"):
                continue
            try:
                found[system] = run_part(_PARTS, part, options, note, limit, env)
            except PartFailed as failure:
                found[system] = {"failed": str(failure)}
                print_note(f"{system} failed: {failure}\n{failure.log}")

    console.print(describe(info))
    targets: list[Target] = []
    for one in cases:
        _print(one, results[one.name], receivers)
        targets += _targets(one, results[one.name])
        if plot is not None:
            file = plot if len(cases) == 1 else plot.with_stem(f"{plot.stem}-{one.name}")
            _plot(file, one, results[one.name])
    if targets:
        print_targets(targets)
    for found in results.values():
        found.get("sglrl", {}).pop("metadata", None)
    document = {
        "bench": "weights",
        "machine": info,
        "replicas": replicas,
        "tp_size": tp_size,
        "cases": {c.name: c._asdict() | {"systems": results[c.name]} for c in cases},
    }
    write_json(json, document, targets)
    if any("failed" in result for found in results.values() for result in found.values()):
        raise typer.Exit(1)


def _systems(case: WeightCase, peers: bool) -> list[str]:
    systems = ["sglrl", "bare broadcast"]
    if peers and case.device == "cuda":
        systems += _SGLANG
    return systems


def _print(case: WeightCase, found: dict[str, dict[str, Any]], receivers: int) -> None:
    ours = found.get("sglrl", {})
    size = ours.get("bytes", 0)
    rows: list[tuple[str, ...]] = []

    def row(name: str, result: dict[str, Any], pause: float | None = None) -> None:
        total = result["total_ms"]
        every = result["all_total_ms"]
        rows.append(
            (
                name,
                number(total),
                f"{number(min(every))} .. {number(max(every))}",
                number(pause if pause is not None else total),
                number(size / total / 1e6),
                *(
                    number(result[k]) if k in result else ""
                    for k in (f"{phase}_ms" for phase in _PHASES)
                ),
            )
        )

    for name, result in ours.get("modes", {}).items():
        row(f"sglrl, {name} ({result['mode']})", result, result["pause_ms"])
    if "total_ms" in found.get("bare broadcast", {}):
        row("bare broadcast", found["bare broadcast"], 0.0)
    for system in _SGLANG:
        for name, result in found.get(system, {}).items():
            if name != "failed":
                row(f"{system}, {name}", result)
    columns = ("ms", "lowest .. highest", "pause ms", "GB/s", *_PHASES)
    load = f"{case.in_flight} requests decoding"
    table(
        f"{case.name}: {size / 1e6:,.1f} MB to {receivers} worker(s), {load}", ("", *columns), rows
    )
    if "join_ms" in ours:
        console.print(
            f"forming the group took {ours['join_ms']:.0f} ms, the first update after that "
            f"{ours['first_ms']:.0f} ms"
        )
    for name, result in found.items():
        if "failed" in result:
            console.print(f"{name}: {result['failed']}", markup=False)


def _targets(case: WeightCase, found: dict[str, dict[str, Any]]) -> list[Target]:
    modes = found.get("sglrl", {}).get("modes", {})
    decoding, paused = modes.get("decoding"), modes.get("paused")
    total = decoding and decoding["total_ms"]
    targets = []
    if case.target_ms is not None:
        name = f"{case.name}: update while decoding"
        targets.append(Target(name, case.target_ms, total, "ms", at_most=True))
    if case.paused_target_ms is not None:
        name, measured = f"{case.name}: update with a pause", paused and paused["total_ms"]
        targets.append(Target(name, case.paused_target_ms, measured, "ms", at_most=True))
        name, measured = f"{case.name}: pause while decoding", decoding and decoding["pause_ms"]
        targets.append(Target(name, 10, measured, "ms", at_most=True))
        for system, way, asked in (
            ("SGLang Engine", "per parameter", 20),
            ("SGLang HTTP", "per parameter", 20),
            (_AS_TORCHRL, "one request", 30),
        ):
            peer = found.get(system, {}).get(way, {}).get("total_ms")
            name = f"{case.name}: times {system}, {way}"
            targets.append(Target(name, asked, _ratio(peer, total), ""))
    return targets


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a and b else None


def _plot(path: Path, case: WeightCase, found: dict[str, dict[str, Any]]) -> None:
    """Plot the decode steps of one request against the phases of one update."""
    timeline = found.get("sglrl", {}).get("modes", {}).get("decoding", {}).get("timeline")
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
