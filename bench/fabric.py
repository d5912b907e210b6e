"""``python -m bench.fabric``: the cost of a call through the fabric, HTTP, Ray and Monarch.

The engine is fake, so that the bench measures the way to the engine and back: 64 token ids in, 64
ids and 64 logprobs out, over the whole path of ``await client.generate(...)`` on one event loop.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated, Any, Literal

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

_PARTS = "bench.fabric_parts"
_PEERS = "bench.fabric_peers"
_OPTIONAL = {"Ray actor": ("ray", "ray"), "Monarch actor": ("monarch", "torchmonarch")}
"""Peers that may be missing: the module, which also names the part, and its package."""
_LEVELS = (64, 512, 4096)
_DEFAULT_ROUTING = ("prefix-aware", "requests")
_LIMIT = 600.0


def main(
    json: Annotated[Path | None, typer.Option(help="Write all figures to this file.")] = None,
    seconds: Annotated[float, typer.Option(help="Length of one repetition.")] = 1.0,
    repeats: Annotated[int, typer.Option(min=1, help="Repetitions; the median counts.")] = 5,
    replicas: Annotated[int, typer.Option(min=1, help="Worker processes of our fabric.")] = 1,
    quick: Annotated[
        bool, typer.Option("--quick", help="One short repetition, for CI: under half a minute.")
    ] = False,
    peers: Annotated[bool, typer.Option(help="Measure HTTP, Ray and Monarch too.")] = True,
    address: Annotated[
        Literal["ipc", "tcp", "both"], typer.Option(help="Transport of our fabric.")
    ] = "both",
) -> None:
    """Measure latency, rate and cost of a call: our fabric, an HTTP echo and other actors."""
    if quick:
        seconds, repeats = 0.1, 1
    info = machine()
    load = {"seconds": seconds, "repeats": repeats, "levels": _LEVELS}
    sglrl = load | {"replicas": replicas, "idle": 0.1 if quick else 4.0}
    memory = load | {"levels": _LEVELS[1:]}
    plan: list[tuple[str, str, str, dict[str, Any]]] = [
        (f"sglrl {transport}", _PARTS, "sglrl", sglrl | {"address": transport})
        for transport in (("ipc", "tcp") if address == "both" else (address,))
    ]
    plan.append(("sglrl actor", _PARTS, "actor", load))
    plan.append(("transport alone (ipc)", _PARTS, "transport", load))
    waiting = {"calls": 5_000 if quick else 20_000}
    plan.append(("waiting calls", _PARTS, "waiting", waiting | {"bare": False}))
    plan.append(("waiting tasks", _PARTS, "waiting", waiting | {"bare": True}))
    for routing in (_DEFAULT_ROUTING, ("requests",)):
        for workers in (1, 1000):
            name = f"in memory, {workers:,} {'worker' if workers == 1 else 'workers'}"
            options = memory | {"workers": workers, "routing": routing}
            plan.append((f"{name}, {'+'.join(routing)}", _PARTS, "memory", options))
    failed: dict[str, str] = {}
    if peers:
        plan.append(("HTTP", _PEERS, "http", load))
        for name, (module, package) in _OPTIONAL.items():
            if importlib.util.find_spec(module) is None:
                failed[name] = f"{package} is not installed"
            else:
                plan.append((name, _PEERS, module, load))

    results: dict[str, Any] = {}
    with steps(len(plan)) as (begin, note):
        for name, module, part, options in plan:
            begin(name)
            try:
                results[name] = run_part(module, part, options, note, _LIMIT)
            except PartFailed as failure:
                failed[name] = str(failure)
                print_note(f"{name} failed: {failure}\n{failure.log}")

    console.print(describe(info))
    _print(results, failed)
    targets = _targets(results)
    print_targets(targets)
    options = {"seconds": seconds, "repeats": repeats, "replicas": replicas}
    document = {
        "bench": "fabric",
        "machine": info,
        "options": options,
        "results": results,
        "failed": failed,
    }
    write_json(json, document, targets)
    if failed.keys() - {"HTTP", *_OPTIONAL}:
        raise typer.Exit(1)


def _print(results: dict[str, Any], failed: dict[str, str]) -> None:
    rows = []
    for name, result in results.items():
        if "latency" not in result:
            continue
        latency, rates = result["latency"], result["rates"]
        at512 = rates["512"]
        rows.append(
            (
                name + (f" ({result['parser']})" if "parser" in result else ""),
                number(latency["p50_us"]),
                number(latency["p99_us"]),
                *(number(rates[str(level)]["rate"]) for level in _LEVELS),
                number(at512["loop_us"]),
                number(at512["cpu_us"]),
            )
        )
    table(
        "64 ids in, 64 ids + 64 logprobs out, one client process",
        (
            "",
            "p50 us",
            "p99 us",
            *(f"req/s at {level}" for level in _LEVELS),
            "loop us/req",
            "CPU us/req",
        ),
        rows,
    )
    for name, reason in failed.items():
        console.print(f"{name}: not measured: {reason}", markup=False)
    rows = [
        (
            name,
            *(number(rates[str(level)]["rate"]) for level in _LEVELS[1:]),
            number(rates["512"]["loop_us"]),
            number(rates["512"]["driver_us"]),
        )
        for name, result in results.items()
        if name.startswith("in memory")
        for rates in (result["rates"],)
    ]
    if rows:
        table(
            "workers that echo on the driver's own event loop",
            ("", "req/s at 512", "req/s at 4096", "loop us/req", "without the echo"),
            rows,
        )
    rows = []
    for name, result in results.items():
        if "idle_cpu" in result:
            rows.append((f"{name}: idle worker, share of a core", f"{result['idle_cpu']:.2%}"))
            rows.append(
                (
                    f"{name}: req/s at 512 when both arrays are read",
                    number(result["arrays_read"]["rate"]),
                )
            )
    waiting = results.get("waiting calls")
    if waiting:
        rows += [
            (
                f"bytes a call, {waiting['calls']:,} waiting: growth of the process",
                number(waiting["resident_bytes"]),
            ),
            ("  as allocated by Python", number(waiting["allocated_bytes"])),
        ]
    floor = results.get("waiting tasks")
    if floor:
        rows += [
            (
                "bytes of a task with such a prompt that waits for a bare future: growth",
                number(floor["resident_bytes"]),
            ),
            ("  as allocated by Python", number(floor["allocated_bytes"])),
        ]
    if rows:
        table("cost", ("", ""), rows)


def _targets(results: dict[str, Any]) -> list[Target]:
    """Return the fabric's targets, with the figures of the first transport measured."""
    name = next((n for n in results if n in ("sglrl ipc", "sglrl tcp")), None)
    ours = results.get(name) if name else None
    rate = _rate(ours)
    targets = [
        Target("p50 at 1 in flight", 200, ours and ours["latency"]["p50_us"], "us", at_most=True),
        Target("requests/s at 512 in flight", 100_000, rate, ""),
        Target("times HTTP", 20, _ratio(rate, _rate(results.get("HTTP"))), ""),
        Target("times Ray", 40, _ratio(rate, _rate(results.get("Ray actor"))), ""),
    ]
    waiting = results.get("waiting calls")
    targets.append(
        Target("a waiting call", 4096, waiting and waiting["resident_bytes"], "bytes", at_most=True)
    )
    routing = "+".join(_DEFAULT_ROUTING)
    many = _rate(results.get(f"in memory, 1,000 workers, {routing}"))
    one = _rate(results.get(f"in memory, 1 worker, {routing}"))
    targets.append(
        Target("1,000 in-memory workers, of the rate with one", 0.5, _ratio(many, one), "")
    )
    targets.append(
        Target(
            f"1,000 in-memory workers, of the rate of {name or 'sglrl'}",
            0.5,
            _ratio(many, rate),
            "",
        )
    )
    targets.append(
        Target("idle worker, share of a core", 0.02, ours and ours["idle_cpu"], "", at_most=True)
    )
    return targets


def _rate(result: dict[str, Any] | None) -> float | None:
    return result["rates"]["512"]["rate"] if result else None


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None


if __name__ == "__main__":
    typer.run(main)
