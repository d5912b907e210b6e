"""``python -m bench.engine``: measure how much of an engine's speed reaches its users.

The bench measures the bare scheduler loop, our client, ``sglang.Engine`` and SGLang's HTTP server
one after the other in one run. All four have the same model, requests and engine arguments.
"""

from __future__ import annotations

import json as json_module
from enum import StrEnum
from functools import partial
from typing import Annotated, Any

import typer

from . import engine_parts
from .cases import CASES, Case, CaseName
from .report import Json, Report, extent, ratio

_SYSTEMS = {
    "bare": ("bare Scheduler loop", engine_parts.bare),
    "sglrl": ("sglrl client", engine_parts.sglrl),
    "engine": ("sglang.Engine", engine_parts.engine),
    "http": ("SGLang HTTP server", engine_parts.http),
}
SystemName = StrEnum("SystemName", {name: name for name in _SYSTEMS})  # type: ignore[misc]
_TITLES = {name: title for name, (title, _) in _SYSTEMS.items()}


def main(
    case: Annotated[
        list[CaseName], typer.Option(help="tiny-cpu needs no GPU, the others one; repeatable.")
    ] = [CaseName["tiny-cpu"]],  # noqa: B006
    json: Json = None,
    system: Annotated[
        list[SystemName] | None, typer.Option(help="Only this system; repeatable.")
    ] = None,
    repeat: Annotated[
        int | None, typer.Option(min=1, help="Repetitions; the median counts.")
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Requests that share one prompt.")] = 1,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="NAME=JSON: an engine argument for every system; repeatable."),
    ] = None,
) -> None:
    """Measure tokens/s and latency of four ways to call one engine."""
    extra = dict(_argument(text) for text in set_ or [])
    cases = [
        one._replace(samples=samples, repeats=repeat or one.repeats, extra=extra)
        for one in (CASES[name] for name in case)
    ]
    for one in cases:
        if one.requests % samples or one.in_flight % samples:
            raise typer.BadParameter(
                f"{samples} samples do not divide {one.name}'s {one.requests} requests and "
                f"{one.in_flight} in flight"
            )
    report = Report("engine", json)
    measured = {}
    for one in cases:
        folder = one.folder
        plan = {
            _TITLES[name]: partial(_SYSTEMS[name][1], case=one, folder=folder)
            for name in system or _SYSTEMS
        }
        results = report.measure(plan, env=one.environment, of=f"{one.name}: ")
        systems = {name: results[title] for name, title in _TITLES.items() if title in results}
        _print(report, one, systems)
        _compare(report, one, systems)
        measured[one.name] = {**one._asdict(), "arguments": one.arguments, "systems": systems}
    report.finish(cases=measured)


def _argument(text: str) -> tuple[str, Any]:
    name, sign, value = text.partition("=")
    try:
        if not sign:
            raise ValueError("there is no '='")
        return name, json_module.loads(value)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is not NAME=JSON: {error}") from None


def _print(report: Report, case: Case, systems: dict[str, dict[str, Any]]) -> None:
    bare = _speed(systems, "bare")
    report.table(
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
        [
            (
                _TITLES[name] + (f", {result['loop']}" if "loop" in result else ""),
                result["tokens_per_s"],
                extent(result["all_tokens_per_s"]),
                f"{result['tokens_per_s'] / bare:.1%}" if bare else "",
                result["p50_s"] * 1e3,
                result["p99_s"] * 1e3,
                result["cpu_us_per_token"],
                result["start_s"],
            )
            for name, result in systems.items()
        ],
    )


def _compare(report: Report, case: Case, systems: dict[str, dict[str, Any]]) -> None:
    if case.samples > 1:
        return
    ours = _speed(systems, "sglrl")
    report.target(f"{case.name}: of the bare loop", 0.97, ratio(ours, _speed(systems, "bare")))
    if case.name == "0.6b":
        for peer in ("engine", "http"):
            times = ratio(ours, _speed(systems, peer))
            report.target(f"{case.name}: times {_TITLES[peer]}", 1.3, times)


def _speed(systems: dict[str, dict[str, Any]], name: str) -> float | None:
    return systems.get(name, {}).get("tokens_per_s")


if __name__ == "__main__":
    typer.run(main)
