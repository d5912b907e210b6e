"""``python -m bench.faults``: a pool under load with repeated faults.

Workers are killed, stopped, slowed down and disconnected. The bench reports the outcome of every
call, and how long its caller had to wait. The tests use ``measure`` too.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Mapping
from enum import StrEnum
from functools import partial
from typing import Annotated, Any

import msgspec
import numpy as np
import typer

import sglrl

from .fault_cases import CASES, FaultCase
from .fault_load import Load, Strike
from .fault_schedule import BURST, FATAL, KILL, schedule
from .fault_strikes import Striker
from .parts import Note
from .report import Json, Report

_IDLE_SECONDS = 30.0
CaseName = StrEnum("CaseName", {name: name for name in CASES})  # type: ignore[misc]


def main(
    case: Annotated[
        list[CaseName] | None,
        typer.Option(help="Repeatable; fake (no SGLang) and sglang-cpu by default."),
    ] = None,
    json: Json = None,
    faults: Annotated[
        int | None, typer.Option(min=0, help="How many; the case's own number by default.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the schedule and the prompts.")] = 0,
) -> None:
    """Inject faults under load: count lost, duplicated and wrong calls, and time the recovery."""
    report = Report("faults", json)
    names = [name.value for name in case or CaseName]
    cases = [CASES[name] for name in names if case or not CASES[name].on_gpus]
    if faults is not None:
        cases = [one._replace(faults=faults) for one in cases]
    plan = {one.name: partial(measure, case=one, model=one.model, seed=seed) for one in cases}
    results = report.measure(plan, limit=1800.0)
    for one in cases:
        if one.name in results:
            _print(report, one, results[one.name])
    report.finish(
        ok=all(result["flawless"] for result in results.values()),
        seed=seed,
        cases={c.name: c._asdict() | {"result": results.get(c.name)} for c in cases},
    )


def print_outcomes(
    report: Report,
    title: str,
    result: Mapping[str, Any],
    faults: int | None,
    more: Mapping[str, str] | None = None,
) -> None:
    """Print how the calls under faults ended, and compare the numbers with the targets.

    Args:
        report: the report of the bench.
        title: the start of the table's title. If it has a colon, the part before the colon also
            begins the names of the targets.
        result: the figures of the run.
        faults: number of faults that should have happened. None: there is no such target.
        more: further rows of the table.
    """
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(result["faults"].items()))
    right = result["answered"] - result["duplicated"] - result["wrong"]
    report.table(
        f"{title}, {result['seconds']:.0f} s, faults: {kinds}",
        ("", ""),
        [
            ("calls submitted", result["submitted"]),
            ("  answered exactly once, as without faults", right),
            *((f"  {what}", result[what]) for what in ("lost", "duplicated", "wrong")),
            ("calls that another worker continued", result["resumed"]),
            ("tokens generated", result["tokens"]),
            ("tokens computed again (prefill)", result["recomputed"]),
            *(more or {}).items(),
        ],
    )
    report.lines(*(f"{count} x {text}" for text, count in result["reasons"].items()))
    report.lines(*result["troubles"])
    name, colon, _ = title.partition(":")
    name = f"{name}: " if colon else ""
    if faults is not None:
        report.target(f"{name}faults", faults, sum(result["faults"].values()))
    for what in ("lost", "duplicated", "wrong"):
        report.target(f"{name}calls {what}", 0, result[what], at_most=True)


def _print(report: Report, case: FaultCase, result: dict[str, Any]) -> None:
    refused: dict[str, int] = result["updates_refused"]
    more = {
        "prompts / left out: no one right answer": f"{result['prompts']} / {result['left_out']}"
    }
    if result["updates"] or refused:
        more["weight updates done / given up"] = f"{result['updates']} / {sum(refused.values())}"
    title = f"{case.name}: {case.replicas} workers, {case.in_flight} callers"
    print_outcomes(report, title, result, case.faults, more)
    report.lines(*(f"{count} x {text}" for text, count in refused.items()))
    report.table(
        "milliseconds from the fault until",
        ("", "count", "p50", "p99", "max"),
        [
            (f"{kind}: {name}", *(spread[key] for key in ("count", "p50", "p99", "max")))
            for figure, name in (
                ("first_ms", "first continued token"),
                ("stream_ms", "every stream's next token"),
                ("back_ms", "replacement ready"),
            )
            for kind, spread in result[figure].items()
            if spread["count"]
        ],
    )
    for asked, figure, name in (
        (case.wait_target, "first_ms", "continued token"),
        (case.back_target, "back_ms", "full strength"),
    ):
        if asked is not None:
            worst = result[figure]["kill alone"].get("max")
            name = f"{case.name}: {name} after a SIGKILL, worst (kill alone)"
            report.target(name, asked, worst, "ms", at_most=True)


async def measure(note: Note, *, case: FaultCase, model: str, seed: int) -> dict[str, Any]:
    """Run the load of a case on a new pool, inject the faults, and return the figures."""
    note("starting")
    async with case.launch(model) as client:
        load = await case.load(client, seed)
        update = case.update_of(client, model, timeout=5.0)
        striker = Striker(client, load, update=update)
        begun = time.monotonic()
        async with load.running(lambda: len(striker.strikes), note):
            await striker.run(schedule(seed, case.faults, case.gap, case.shares, BURST))
        seconds = time.monotonic() - begun
        troubles = striker.missing or await _troubles(client, load)
    return {
        "faults": dict(Counter(strike.kind for strike in striker.strikes)),
        "seconds": seconds,
        "prompts": len(load.prompts),
        "left_out": len(case.prompts(seed)) - len(load.prompts),
        **msgspec.to_builtins(load.outcomes),
        "troubles": troubles,
        "updates": striker.updates,
        "updates_refused": dict(striker.refused),
        "flawless": load.outcomes.flawless and not troubles,
        **_recovery(striker.strikes),
    }


async def _troubles(client: sglrl.Client, load: Load) -> list[str]:
    """Describe everything that is wrong in a pool that should be idle."""
    troubles = load.left_over()
    prompt, answer = load.prompts[0], load.answers[0]
    for worker in client.workers:
        made = await client.generate(
            input_ids=prompt.ids, worker=worker.id, timeout=30, **prompt.options
        )
        if load.tolerance is not None and not np.array_equal(made.output_ids, answer.ids):
            troubles.append(f"worker {worker.id} answers otherwise than before")
    if len({worker.weight_version for worker in client.workers}) > 1:
        troubles.append("the workers' weights are of different versions")
    stats = await client.stats()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_IDLE_SECONDS):
            # An answered request may stay in the engine's batch for one more step.
            while any(s.engine.running or s.engine.waiting for s in stats):
                stats = await client.stats()
    if len(stats) != len(client.workers):
        troubles.append(f"only {len(stats)} workers of {len(client.workers)} are ready")
    troubles += [
        f"worker {s.worker} still runs {s.engine.running + s.engine.waiting} requests"
        for s in stats
        if s.engine.running or s.engine.waiting
    ]
    return troubles


def _recovery(strikes: list[Strike]) -> dict[str, dict[str, Any]]:
    """Return the milliseconds from the faults until the pool recovered, by kind of fault.

    "first_ms" is the time until the first of the worker's streams continued. "stream_ms" has the
    times until each of its streams continued. "back_ms" is the time until the replacement was
    ready. The kind "kill alone" has the kills after which no call could move to a stopped worker.
    The kind "kill by itself" leaves out the kills of "kill alone" that happened while another
    worker was being replaced.
    """
    away = [strike for strike in strikes if strike.kind in FATAL]
    kinds = {kind: [s for s in away if s.kind == kind] for kind in FATAL}
    kinds = {kind: group for kind, group in kinds.items() if group}
    kinds["kill alone"] = [strike for strike in kinds.get(KILL, []) if strike.alone]
    kinds["kill by itself"] = [
        strike for strike in kinds["kill alone"] if not any(_overlap(strike, o) for o in away)
    ]
    return {
        "first_ms": {
            kind: _spread([min(s.waits) for s in group if s.waits]) for kind, group in kinds.items()
        },
        "stream_ms": {
            kind: _spread([wait for s in group for wait in s.waits])
            for kind, group in kinds.items()
        },
        "back_ms": {
            kind: _spread([s.back for s in group if s.back is not None])
            for kind, group in kinds.items()
        },
    }


def _overlap(one: Strike, other: Strike) -> bool:
    if one is other:
        return False
    first, second = sorted((one, other), key=lambda strike: strike.at)
    return first.back is None or second.at < first.at + first.back


def _spread(seconds: list[float]) -> dict[str, float]:
    """Return count, median, 99th percentile and maximum, in milliseconds."""
    if not seconds:
        return {"count": 0}
    p50, p99, worst = (float(v) * 1e3 for v in np.percentile(seconds, (50, 99, 100)))
    return {"count": len(seconds), "p50": p50, "p99": p99, "max": worst}


if __name__ == "__main__":
    typer.run(main)
