"""``python -m bench.rollout``: the driver's cost of agents, and how busy they keep the engines.

Without a GPU, thousands of agents with simulated tools run over fake engines. The bench compares
them with the same agents over HTTP, and with batches that wait for their last agent. With a GPU
(``--case h200``), the bench measures how much of the contents of a real engine's prefix cache its
requests find there.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from .cases import CASES, engine_arguments, environment, model_folder
from .parts import PartFailed, run_part
from .payload import TOKENS
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
from .tool_parts import WAYS

_PARTS = "bench.rollout_parts"
_PREFIX = "bench.prefix_parts"
_DEPTH = "bench.depth_parts"
_TOOLS = "bench.tool_parts"
_LIMIT = 600.0
_TURNS = 5
_OURS = "sglrl.rollout"
_AWAY = "sglrl.rollout, agents in {} processes"
_HTTP = "gather over HTTP"
_BARE = "client.generate, one turn"
_BESIDE = "beside a program that computes"
_ADAPTS = "as it adapts"
_PLACES = "engines with {} places"
_SLOWER = "engines that every request slows down"
_TOOL_SECONDS = (0.01, 0.05)
_WITH_TOOLS = "with and without tools"


def main(
    case: Annotated[
        Literal["fake", "h200"],
        typer.Option(help="fake: no GPU. h200: one real engine, Qwen3-0.6B's shapes, one GPU."),
    ] = "fake",
    json: Annotated[Path | None, typer.Option(help="Write all figures to this file.")] = None,
    agents: Annotated[
        int | None, typer.Option(min=8, help="None: 10,000; 512 of --case h200.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Repetitions; the median counts.")] = 3,
    replicas: Annotated[int, typer.Option(min=1, help="Fake engines.")] = 4,
    processes: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Also measure the agents in this many processes. None: 4 on a machine "
            "of 12 cores or more, else 0.",
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Few agents, for CI.")] = False,
    peers: Annotated[bool, typer.Option(help="Measure the HTTP loop too.")] = True,
    device: Annotated[
        Literal["cuda", "cpu"], typer.Option(help="Of --case h200; cpu: the tiny model.")
    ] = "cuda",
) -> None:
    """Measure the cost of an agent's turn, how busy engines are, and hits in the prefix cache."""
    if case == "fake":
        count = agents or (400 if quick else 10_000)
        if processes is None:
            # The driver and the engines need their own cores.
            processes = 4 if (os.cpu_count() or 1) >= 12 else 0
        _fake(json, count, 1 if quick else repeats, replicas, processes, quick, peers)
    else:
        _h200(json, agents or (32 if device == "cpu" else 512), repeats, device)


# --- fake engines -----------------------------------------------------------------------------


def _fake(
    json: Path | None,
    agents: int,
    repeats: int,
    replicas: int,
    processes: int,
    quick: bool,
    peers: bool,
) -> None:
    info = machine()
    load = {
        "agents": agents,
        "turns": _TURNS,
        "tool": _TOOL_SECONDS,
        "replicas": replicas,
        "repeats": repeats,
    }
    # The tools of the quick agents take about as long as their turns.
    busy = load | {
        "tool": (0.005, 0.025) if quick else (0.02, 0.1),
        "slower": 4,
        "places": 8 if quick else 64,
        "step_seconds": 0.008,
        "tokens_per_step": 32 if quick else 8,
        "capacity_seconds": 0.5 if quick else 4.0,
        "other_agents": max(16 if quick else 64, agents // 4),
        "fixed": (2,) if quick else (0.5, 1, 2, 4, 16),
        "batches": (2,) if quick else (2, 4),
    }
    bare = {
        "seconds": 0.1 if quick else 1.0,
        "repeats": 1 if quick else 5,
        "levels": (512,),
        "replicas": replicas,
        "address": "ipc",
        "idle": 0.1,
    }
    plan: list[tuple[str, str, str, dict[str, Any]]] = [
        (_OURS, _PARTS, "agents", load),
        (_BARE, "bench.fabric_parts", "sglrl", bare),
    ]
    away = _AWAY.format(processes)
    if processes:
        plan.insert(1, (away, _PARTS, "agents", load | {"processes": processes}))
    if peers:
        plan.append((_HTTP, _PARTS, "http", load | {"in_flight": 512}))
    beside = {
        "agents": 100 if quick else 5000,
        "turns": 4,
        "tool": (0.01, 0.03),
        "at_a_time": 256,
        "replicas": 2,
        "ways": (1, processes) if processes > 1 else (1, 2),
    }
    plan.append((_BESIDE, _PARTS, "beside", beside))
    plan.append(("busy", _PARTS, "busy", busy))
    depth = {
        "items": 16 if quick else 600,
        "group_size": 8,
        "batch": 4 if quick else 64,
        "turns": 2 if quick else 4,
        "tool": (0.02, 0.1),
        "replicas": replicas,
    }
    tools = load | {"agents": max(64, agents // 20)}
    plan.append((_WITH_TOOLS, _TOOLS, "agents", tools))
    engines = {
        _PLACES.format(busy["places"]): {"max_running_requests": busy["places"]},
        _SLOWER: {"request_seconds": 0.0005},
    }
    for name, engine in engines.items():
        steps_of = {"step_seconds": 0.005 if quick else 0.02, "tokens_per_step": 8}
        plan.append((name, _DEPTH, "depth", depth | {"engine": steps_of | engine}))

    results: dict[str, Any] = {}
    failed: dict[str, str] = {}
    with steps(len(plan)) as (begin, note):
        for name, module, part, options in plan:
            begin("engines kept busy" if name == "busy" else name)
            try:
                results[name] = run_part(module, part, options, note, _LIMIT)
            except PartFailed as failure:
                failed[name] = str(failure)
                print_note(f"{name} failed: {failure}\n{failure.log}")
    if _BARE in results:
        results[_BARE] = results[_BARE]["rates"]["512"]

    console.print(describe(info))
    _print_cost(results, failed, (_OURS, away, _BARE, _HTTP), agents)
    if _WITH_TOOLS in results:
        _print_tools(results[_WITH_TOOLS], tools)
    if _BESIDE in results:
        _print_beside(results[_BESIDE]["ways"], beside)
    if "busy" in results:
        _print_busy(results["busy"], busy)
    measured = [name for name in engines if name in results]
    for name in measured:
        _print_depth(name, results[name], depth)
    targets = _targets(results, away, peers)
    for name in measured:
        targets += _depth_targets(name, results[name])
    print_targets(targets)
    document = {
        "bench": "rollout",
        "case": "fake",
        "machine": info,
        "options": {"cost": load, "tools": tools, "busy": busy, "depth": depth},
        "results": results,
        "failed": failed,
    }
    write_json(json, document, targets)
    if any(name != _HTTP for name in failed):
        raise typer.Exit(1)


def _print_cost(
    results: dict[str, Any], failed: dict[str, str], names: Sequence[str], agents: int
) -> None:
    rows = []
    for name in names:
        if name not in results:
            continue
        result = results[name]
        parser = f" ({result['parser']})" if "parser" in result else ""
        held = result.get("bytes_per_agent")
        rows.append(
            (
                name + parser,
                number(result["rate"]),
                number(result["cpu_us"]),
                number(result["loop_us"]),
                number(1e6 / result["cpu_us"]),
                number(held and held / 1000),
            )
        )
    table(
        f"{agents:,} agents of {_TURNS} turns at a time; a turn: {TOKENS} ids + logprobs out",
        ("", "turns/s", "CPU us/turn", "loop us/turn", "turns/s of a core", "kB an agent"),
        rows,
    )
    for name, reason in failed.items():
        console.print(f"{name}: not measured: {reason}", markup=False)


def _print_tools(ways: dict[str, Any], options: dict[str, Any]) -> None:
    table(
        f"{options['agents']:,} agents of {_TURNS} turns at a time, with a tool between two turns",
        ("its results are", "turns/s", "CPU us/turn", "loop us/turn"),
        [
            (WAYS[way], *(number(cost[key]) for key in ("rate", "cpu_us", "loop_us")))
            for way, cost in ways.items()
        ],
    )


def _print_beside(ways: Sequence[dict[str, Any]], options: dict[str, Any]) -> None:
    table(
        f"{options['at_a_time']} agents of {options['turns']} turns at a time, 1 ms of Python for "
        "each one's reward; a thread of the driver computes in Python all the time, or does not",
        (
            "agents in",
            "turns/s alone",
            "beside the thread",
            "its steps/s",
            "with a switch interval of 0.5 ms",
            "its steps/s",
        ),
        [
            (
                "the driver" if alone["processes"] is None else f"{alone['processes']} processes",
                number(alone["rate"]),
                number(busy["rate"]),
                number(busy["steps_per_s"]),
                number(quick["rate"]),
                number(quick["steps_per_s"]),
            )
            for alone, busy, quick in zip(ways[::3], ways[1::3], ways[2::3], strict=True)
        ],
    )


def _print_busy(result: dict[str, Any], options: dict[str, Any]) -> None:
    places = options["places"] * options["replicas"]
    table(
        f"{options['replicas']} engines with {options['places']} places each ({places} together, "
        f"{number(result['capacity_tokens_per_s'])} tokens/s when never short of requests); "
        f"1 of 4 agents takes {options['slower']} times as long, in tokens and in tools",
        (
            "agents at a time",
            "engines busy",
            "idle",
            "tokens/s",
            "agents at a time, at the end",
            "turn p50 ms",
            "CPU us/turn",
        ),
        [
            (
                name,
                f"{way['busy']:.1%}",
                f"{1 - way['busy']:.1%}",
                number(way["tokens_per_s"]),
                number(way["concurrency"]),
                number(way["turn_p50_s"] * 1e3),
                number(way["cpu_us_per_turn"]),
            )
            for name, way in result["ways"].items()
        ],
    )


def _print_depth(engines: str, result: dict[str, Any], options: dict[str, Any]) -> None:
    table(
        f"{engines}: {options['items']} items, {options['group_size']} samples each, "
        f"{options['turns']} turns a sample; a batch has {options['batch']} groups",
        (
            "samples at a time",
            "first group s",
            "first batch s",
            "all groups s",
            "most samples at a time",
            "tokens/s",
        ),
        [
            (
                name,
                number(way["first_group_s"]),
                number(way["first_batch_s"]),
                number(way["seconds"]),
                number(way["most_running"]),
                number(way["tokens_per_s"]),
            )
            for name, way in result["ways"].items()
        ],
    )


def _depth_targets(engines: str, result: dict[str, Any]) -> list[Target]:
    return [
        Target(
            f"{engines}: engines busy between the first and the last batch",
            0.95,
            result["busy"],
            "",
        ),
        Target(
            f"{engines}: first batch, times one batch alone",
            2.0,
            result["first_batch"],
            "",
            at_most=True,
        ),
    ]


def _targets(results: dict[str, Any], away: str, peers: bool) -> list[Target]:
    ours, http = results.get(_OURS), results.get(_HTTP)
    ways = [way for way in (ours, results.get(away)) if way]
    most = max(ways, key=lambda way: float(way["rate"]), default=None)
    busy = results.get("busy")
    targets = [
        Target("turns/s of a driver core, all threads", 20_000, ours and 1e6 / ours["cpu_us"], ""),
        Target(
            "engines busy, 1 of 4 agents 4 times slower",
            0.95,
            busy and busy["ways"][_ADAPTS]["busy"],
            "",
        ),
    ]
    if peers:
        where = "" if most is ours else ", agents in processes"
        what = f"times the turns/s over HTTP{where}"
        ratio = most["rate"] / http["rate"] if most and http else None
        targets.append(Target(what, 10, ratio, ""))
    return targets


# --- a real engine ----------------------------------------------------------------------------


def _h200(json: Path | None, agents: int, repeats: int, device: str) -> None:
    info = machine()
    on_gpu = device == "cuda"
    case = CASES["0.6b" if on_gpu else "tiny-cpu"]._replace(in_flight=agents)
    options = {
        "model": str(model_folder(case)),
        "device": device,
        "dtype": case.dtype,
        "arguments": engine_arguments(case, {}),
        "agents": agents,
        "turns": 4,
        "system": 512 if on_gpu else 128,
        "question": 64 if on_gpu else 32,
        "new": 64 if on_gpu else 16,
        "tool": 32 if on_gpu else 16,
        "tool_seconds": 0.05,
        "repeats": repeats,
    }
    failed: dict[str, str] = {}
    result: dict[str, Any] | None = None
    with steps(1) as (begin, note):
        begin(f"{agents} agents, {case.model}")
        try:
            result = run_part(_PREFIX, "prefix", options, note, _LIMIT, environment(case))
        except PartFailed as failure:
            failed["prefix"] = str(failure)
            print_note(f"failed: {failure}\n{failure.log}")

    console.print(describe(info))
    if result is not None:
        _print_prefix(result, options, case.model)
    targets = [Target("prefix-cache hits of the ideal", 0.9, result and result["of_ideal"], "")]
    print_targets(targets)
    document = {
        "bench": "rollout",
        "case": "h200",
        "machine": info,
        "options": options | {"model": case.model},
        "results": result,
        "failed": failed,
    }
    write_json(json, document, targets)
    if failed:
        raise typer.Exit(1)


def _print_prefix(result: dict[str, Any], options: dict[str, Any], model: str) -> None:
    rows = [
        (
            f"turn {index}",
            number(row["prompt"]),
            number(row["cached"]),
            number(row["ideal"]),
            f"{row['cached'] / row['ideal']:.2%}",
        )
        for index, row in enumerate(result["by_turn"], 1)
    ]
    total = {name: sum(row[name] for row in result["by_turn"]) for name in result["by_turn"][0]}
    rows.append(("all", *(number(n) for n in total.values()), f"{result['of_ideal']:.2%}"))
    table(
        f"{model}: {options['agents']} agents of {options['turns']} turns, a system prompt of "
        f"{options['system']} tokens, {options['question']} of a question, {options['new']} new "
        f"and {options['tool']} of a tool a turn; {number(result['tokens_per_s'])} tokens/s, "
        f"start {number(result['start_s'])} s",
        ("", "prompt tokens", "from the cache", "at best", "of the best"),
        rows,
    )


if __name__ == "__main__":
    typer.run(main)
