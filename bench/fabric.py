"""``python -m bench.fabric``: measure the cost of a call through our fabric, HTTP, Ray and Monarch.

The engine is fake, so that the bench measures only the way to the engine and back. A call sends 64
token ids and returns 64 ids and 64 logprobs. For our fabric, this is the whole path of ``await
client.generate(...)`` on one event loop.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal

import typer

from . import fabric_parts, fabric_peers
from .load import LoadPlan
from .parts import Part
from .report import Json, Report, ratio

_OPTIONAL: dict[str, tuple[str, str, Callable[..., Any]]] = {
    "Ray actor": ("ray", "ray", fabric_peers.ray),
    "Monarch actor": ("monarch", "torchmonarch", fabric_peers.monarch),
}
"""For each peer that may be missing: its module, its package, and the part that measures it."""
_LEVELS = (64, 512, 4096)
_DEFAULT_ROUTING = ("prefix-aware", "requests")


def main(
    json: Json = None,
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
    report = Report("fabric", json)
    seconds, repeats = (0.1, 1) if quick else (1.0, 5)
    load = LoadPlan(seconds, repeats, _LEVELS)
    plan: dict[str, Part] = {
        f"sglrl {transport}": partial(
            fabric_parts.sglrl,
            replicas=replicas,
            address=transport,
            load=load,
            idle_seconds=0.1 if quick else 4.0,
        )
        for transport in (("ipc", "tcp") if address == "both" else (address,))
    }
    plan["sglrl actor"] = partial(fabric_parts.actor, load=load)
    plan["transport alone (ipc)"] = partial(fabric_parts.transport, load=load)
    calls = 5_000 if quick else 20_000
    plan["waiting calls"] = partial(fabric_parts.waiting, calls=calls, bare=False)
    plan["waiting tasks"] = partial(fabric_parts.waiting, calls=calls, bare=True)
    for routing in (_DEFAULT_ROUTING, ("requests",)):
        for workers in (1, 1000):
            plan[_in_memory(workers, routing)] = partial(
                fabric_parts.memory,
                workers=workers,
                routing=routing,
                load=load._replace(levels=_LEVELS[1:]),
            )
    if peers:
        plan["HTTP"] = partial(fabric_peers.http, load=load)
        for name, (module, package, part) in _OPTIONAL.items():
            if importlib.util.find_spec(module) is None:
                report.failed[name] = f"{package} is not installed"
            else:
                plan[name] = partial(part, load=load)
    results = report.measure(plan)
    _print(report, results)
    _compare(report, results)
    options = {"seconds": seconds, "repeats": repeats, "replicas": replicas}
    report.finish(may_fail=("HTTP", *_OPTIONAL), options=options, results=results)


def _in_memory(workers: int, routing: tuple[str, ...]) -> str:
    return f"in memory, {workers:,} worker{'s' * (workers > 1)}, {'+'.join(routing)}"


def _print(report: Report, results: dict[str, Any]) -> None:
    rates = {name: result["rates"] for name, result in results.items() if "rates" in result}
    report.table(
        "64 ids in, 64 ids + 64 logprobs out, one client process",
        ("", "p50 us", "p99 us", *(f"req/s at {n}" for n in _LEVELS), "loop us/req", "CPU us/req"),
        [
            (
                name + (f" ({result['parser']})" if "parser" in result else ""),
                result["latency"]["p50_us"],
                result["latency"]["p99_us"],
                *(rates[name][str(level)]["rate"] for level in _LEVELS),
                rates[name]["512"]["loop_us"],
                rates[name]["512"]["cpu_us"],
            )
            for name, result in results.items()
            if "latency" in result
        ],
    )
    report.table(
        "workers that echo on the driver's own event loop",
        ("", "req/s at 512", "req/s at 4096", "loop us/req", "without the echo"),
        [
            (
                name,
                *(figures[str(level)]["rate"] for level in _LEVELS[1:]),
                figures["512"]["loop_us"],
                figures["512"]["driver_us"],
            )
            for name, figures in rates.items()
            if name.startswith("in memory")
        ],
    )
    rows: list[tuple[str, str | float]] = []
    for name, result in results.items():
        if "idle_cpu" in result:
            rows.append((f"{name}: idle worker, share of a core", f"{result['idle_cpu']:.2%}"))
            share = result["watching"]
            rows.append((f"{name}: a snapshot and metrics each second", f"{share:.2%} of a core"))
            read = result["arrays_read"]["rate"]
            rows.append((f"{name}: req/s at 512 when both arrays are read", read))
        if "resident_bytes" in result:
            what = "a call" if name == "waiting calls" else "of a task for a bare future"
            title = f"bytes {what}, {result['calls']:,} waiting: growth of the process"
            rows.append((title, result["resident_bytes"]))
            rows.append(("  as allocated by Python", result["allocated_bytes"]))
    report.table("cost", ("", ""), rows)


def _compare(report: Report, results: dict[str, Any]) -> None:
    """Compare figures with the targets. Our figures are those of the first measured transport."""
    name = next((n for n in results if n in ("sglrl ipc", "sglrl tcp")), "sglrl")
    ours = results.get(name)
    waiting = results.get("waiting calls")

    def rate(name: str) -> float | None:
        return results[name]["rates"]["512"]["rate"] if name in results else None

    many, one = (rate(_in_memory(workers, _DEFAULT_ROUTING)) for workers in (1000, 1))
    target = report.target
    target("p50 at 1 in flight", 200, ours and ours["latency"]["p50_us"], "us", at_most=True)
    target("requests/s at 512 in flight", 100_000, rate(name))
    watching = ours and 100 * ours["watching"]
    target("a snapshot and metrics each second", 1, watching, "% of a core", at_most=True)
    target("times HTTP", 20, ratio(rate(name), rate("HTTP")))
    target("times Ray", 40, ratio(rate(name), rate("Ray actor")))
    target("a waiting call", 4096, waiting and waiting["resident_bytes"], "bytes", at_most=True)
    target("1,000 in-memory workers, of the rate with one", 0.5, ratio(many, one))
    target(f"1,000 in-memory workers, of the rate of {name}", 0.5, ratio(many, rate(name)))
    target("idle worker, share of a core", 0.02, ours and ours["idle_cpu"], at_most=True)


if __name__ == "__main__":
    typer.run(main)
