"""``python -m bench.engine``: how much of an engine's speed reaches its users.

The bench measures the bare scheduler loop, our client, ``sglang.Engine`` and SGLang's HTTP server
one after the other in one run. All have the same model, requests and engine arguments.
"""

from __future__ import annotations

import json as json_module
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from .cases import CASES, Case, engine_arguments, environment, model_folder
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

_PARTS = "bench.engine_parts"
_SYSTEMS = {
    "bare": "bare Scheduler loop",
    "sglrl": "sglrl client",
    "engine": "sglang.Engine",
    "http": "SGLang HTTP server",
}

CaseName = Enum("CaseName", {name: name for name in CASES})  # type: ignore[misc]
SystemName = Enum("SystemName", {name: name for name in _SYSTEMS})  # type: ignore[misc]


def main(
    case: Annotated[
        list[CaseName], typer.Option(help="tiny-cpu needs no GPU, the others one; repeatable.")
    ] = [CaseName["tiny-cpu"]],  # noqa: B006
    json: Annotated[Path | None, typer.Option(help="Write all figures to this file.")] = None,
    system: Annotated[
        list[SystemName] | None, typer.Option(help="Only this system; repeatable.")
    ] = None,
    repeat: Annotated[
        int | None, typer.Option(min=1, help="Repetitions; the median counts.")
    ] = None,
    requests: Annotated[int | None, typer.Option(min=1, help="Requests of one repetition.")] = None,
    samples: Annotated[int, typer.Option(min=1, help="Requests that share one prompt.")] = 1,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="NAME=JSON: an engine argument for every system; repeatable."),
    ] = None,
    limit: Annotated[
        float, typer.Option(help="Seconds one system may take, start-up included.")
    ] = 240.0,
) -> None:
    """Measure tokens/s and latency of four ways to call one engine."""
    extra = dict(_argument(text) for text in set_ or [])
    systems = [s.value for s in system] if system else list(_SYSTEMS)
    cases = [CASES[c.value] for c in case]
    if requests is not None:
        cases = [c._replace(requests=requests) for c in cases]
    cases = [c._replace(samples=samples) for c in cases]
    for one in cases:
        if one.requests % samples or one.in_flight % samples:
            raise typer.BadParameter(
                f"{samples} samples do not divide {one.name}'s {one.requests} requests and "
                f"{one.in_flight} in flight"
            )
    info = machine()
    results: dict[str, dict[str, Any]] = {}
    with steps(len(cases) * len(systems)) as (begin, note):
        for one in cases:
            repeats = repeat or one.repeats
            found = results[one.name] = {}
            arguments = engine_arguments(one, extra)
            options = {
                "case": one,
                "model": str(model_folder(one)),
                "repeats": repeats,
                "arguments": arguments,
            }
            for name in systems:
                begin(f"{one.name}: {_SYSTEMS[name]}")
                try:
                    found[name] = run_part(_PARTS, name, options, note, limit, environment(one))
                except PartFailed as failure:
                    found[name] = {"failed": str(failure)}
                    print_note(f"{_SYSTEMS[name]} failed: {failure}\n{failure.log}")

    console.print(describe(info))
    targets: list[Target] = []
    for one in cases:
        _print(one, results[one.name])
        targets += _targets(one, results[one.name])
    if targets:
        print_targets(targets)
    document = {
        "bench": "engine",
        "machine": info,
        "cases": {
            c.name: c._asdict()
            | {
                "repeats": repeat or c.repeats,
                "arguments": engine_arguments(c, extra),
                "systems": results[c.name],
            }
            for c in cases
        },
    }
    write_json(json, document, targets)
    if any("failed" in result for found in results.values() for result in found.values()):
        raise typer.Exit(1)


def _argument(text: str) -> tuple[str, Any]:
    name, sign, value = text.partition("=")
    try:
        if not sign:
            raise ValueError("there is no '='")
        return name, json_module.loads(value)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is not NAME=JSON: {error}") from None


def _print(case: Case, found: dict[str, dict[str, Any]]) -> None:
    bare = _speed(found, "bare")
    rows: list[tuple[str, ...]] = []
    for name, result in found.items():
        if "failed" in result:
            rows.append((_SYSTEMS[name], "failed", "", "", "", "", ""))
            continue
        speed, rates = result["tokens_per_s"], result["all_tokens_per_s"]
        rows.append(
            (
                _SYSTEMS[name] + (f", {result['loop']}" if "loop" in result else ""),
                number(speed),
                f"{number(min(rates))} .. {number(max(rates))}",
                f"{speed / bare:.1%}" if bare else "",
                number(result["p50_s"] * 1e3),
                number(result["p99_s"] * 1e3),
                number(result["cpu_us_per_token"]),
                number(result["start_s"]),
            )
        )
    table(
        f"{case.name}: {case.prompt} in, {case.new} out, {case.in_flight:,} in flight, "
        f"{case.requests:,} requests, logprobs"
        + (f", {case.samples} of each prompt" if case.samples > 1 else ""),
        (
            "",
            "tokens/s",
            "lowest .. highest",
            "of bare",
            "p50 ms",
            "p99 ms",
            "CPU us/token",
            "start s",
        ),
        rows,
    )
    for name, result in found.items():
        if "failed" in result:
            console.print(f"{_SYSTEMS[name]}: {result['failed']}", markup=False)


def _targets(case: Case, found: dict[str, dict[str, Any]]) -> list[Target]:
    if case.samples > 1:
        return []
    ours = _speed(found, "sglrl")
    targets = [
        Target(f"{case.name}: of the bare loop", 0.97, _ratio(ours, _speed(found, "bare")), "")
    ]
    if case.name == "0.6b":
        targets += [
            Target(
                f"{case.name}: times {_SYSTEMS[peer]}", 1.3, _ratio(ours, _speed(found, peer)), ""
            )
            for peer in ("engine", "http")
        ]
    return targets


def _speed(found: dict[str, dict[str, Any]], name: str) -> float | None:
    return found.get(name, {}).get("tokens_per_s")


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None


if __name__ == "__main__":
    typer.run(main)
