"""``python -m bench.rollout``: measure the driver's cost of agents, and how busy engines are.

Without a GPU, thousands of agents with simulated tools run over fake engines. The bench compares
them with the same agents over HTTP, and with batches that wait for their last agent. With a GPU
(``--case h200``), the bench measures the prefix cache of a real engine: how many tokens come from
the cache, compared with an ideal cache.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Annotated, Any, Literal

import typer

from . import busy_parts, fabric_parts, prefix_parts, rollout_parts, tool_parts
from .cases import CASES
from .load import LoadPlan
from .parts import Part
from .payload import TOKENS
from .report import Json, Report, ratio

_TURNS = 5
_OURS = "sglrl.rollout"
_AWAY = "sglrl.rollout, agents in {} processes"
_HTTP = "gather over HTTP"
_BARE = "client.generate, one turn"
_BESIDE = "beside a program that computes"
_BUSY = "busy"
_PLACES = "engines with {} places"
_SLOWER = "engines that every request slows down"
_WITH_TOOLS = "with and without tools"


def main(
    case: Annotated[
        Literal["fake", "h200"],
        typer.Option(help="fake: no GPU. h200: one real engine, Qwen3-0.6B's shapes, one GPU."),
    ] = "fake",
    json: Json = None,
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
    report = Report("rollout", json)
    if case == "h200":
        _h200(report, agents or (32 if device == "cpu" else 512), repeats, device == "cuda")
        return
    agents = agents or (400 if quick else 10_000)
    if processes is None:
        # The driver and the engines need their own cores.
        processes = 4 if (os.cpu_count() or 1) >= 12 else 0
    _fake(report, agents, 1 if quick else repeats, replicas, processes, quick, peers)


# --- fake engines -----------------------------------------------------------------------------


def _fake(
    report: Report,
    agents: int,
    repeats: int,
    replicas: int,
    processes: int,
    quick: bool,
    peers: bool,
) -> None:
    run = {"agents": agents, "turns": _TURNS, "tool": (0.01, 0.05)}
    cost = run | {"replicas": replicas, "repeats": repeats}
    tools = cost | {"agents": max(64, agents // 20)}
    beside = {
        "agents": 100 if quick else 5000,
        "turns": 4,
        "tool": (0.01, 0.03),
        "at_a_time": 256,
        "replicas": 2,
        "ways": (1, processes) if processes > 1 else (1, 2),
    }
    busy = {
        "agents": agents,
        "other_agents": max(16 if quick else 64, agents // 4),
        "turns": _TURNS,
        # With --quick, tools take about as long as turns.
        "tool": (0.005, 0.025) if quick else (0.02, 0.1),
        "replicas": replicas,
        "places": 8 if quick else 64,
        "slower": 4,
        "step_seconds": 0.008,
        "tokens_per_step": 32 if quick else 8,
        "capacity_seconds": 0.5 if quick else 4.0,
        "fixed": (2,) if quick else (0.5, 1, 2, 4, 16),
        "batches": (2,) if quick else (2, 4),
    }
    depth = {
        "items": 16 if quick else 600,
        "group_size": 8,
        "batch": 4 if quick else 64,
        "turns": 2 if quick else 4,
        "tool": (0.02, 0.1),
        "replicas": replicas,
    }
    steps = {"step_seconds": 0.005 if quick else 0.02, "tokens_per_step": 8}
    engines = {
        _PLACES.format(busy["places"]): steps | {"max_running_requests": busy["places"]},
        _SLOWER: steps | {"request_seconds": 0.0005},
    }
    away = _AWAY.format(processes)
    plan: dict[str, Part] = {_OURS: partial(rollout_parts.agents, **cost)}
    if processes:
        plan[away] = partial(rollout_parts.agents, **cost, processes=processes)
    plan[_BARE] = partial(
        fabric_parts.sglrl,
        replicas=replicas,
        address="ipc",
        load=LoadPlan(0.1 if quick else 1.0, 1 if quick else 5, (512,)),
        idle_seconds=0.1,
    )
    if peers:
        plan[_HTTP] = partial(rollout_parts.http, **run, in_flight=512)
    plan[_BESIDE] = partial(rollout_parts.beside, **beside)
    plan[_BUSY] = partial(busy_parts.busy, **busy)
    plan[_WITH_TOOLS] = partial(tool_parts.agents, **tools)
    for name, engine in engines.items():
        plan[name] = partial(busy_parts.depth, **depth, engine=engine)

    results = report.measure(plan)
    if _BARE in results:
        results[_BARE] = results[_BARE]["rates"]["512"]
    _print_cost(
        report, {n: results[n] for n in (_OURS, away, _BARE, _HTTP) if n in results}, agents
    )
    if _WITH_TOOLS in results:
        report.table(
            f"{tools['agents']:,} agents of {_TURNS} turns at a time, a tool between two turns",
            ("its results are", "turns/s", "CPU us/turn", "loop us/turn"),
            [
                (tool_parts.WAYS[way], *(figures[key] for key in ("rate", "cpu_us", "loop_us")))
                for way, figures in results[_WITH_TOOLS].items()
            ],
        )
    if _BESIDE in results:
        _print_beside(report, results[_BESIDE]["ways"], beside)
    if _BUSY in results:
        _print_busy(report, results[_BUSY], busy)
    _compare(report, results, away, peers)
    for name in engines:
        if name in results:
            _print_depth(report, name, results[name], depth)
    options = {"cost": cost, "tools": tools, "busy": busy, "depth": depth}
    report.finish(may_fail=(_HTTP,), case="fake", options=options, results=results)


def _print_cost(report: Report, results: dict[str, Any], agents: int) -> None:
    report.table(
        f"{agents:,} agents of {_TURNS} turns at a time; a turn: {TOKENS} ids + logprobs out",
        ("", "turns/s", "CPU us/turn", "loop us/turn", "turns/s of a core", "kB an agent"),
        [
            (
                name + (f" ({result['parser']})" if "parser" in result else ""),
                result["rate"],
                result["cpu_us"],
                result["loop_us"],
                1e6 / result["cpu_us"],
                ratio(result.get("bytes_per_agent"), 1000),
            )
            for name, result in results.items()
        ],
    )


def _print_beside(report: Report, ways: list[dict[str, Any]], options: dict[str, Any]) -> None:
    report.table(
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
                alone["rate"],
                *(slow[figure] for slow in (busy, quick) for figure in ("rate", "steps_per_s")),
            )
            for alone, busy, quick in zip(ways[::3], ways[1::3], ways[2::3], strict=True)
        ],
    )


def _print_busy(report: Report, result: dict[str, Any], options: dict[str, Any]) -> None:
    places = options["places"] * options["replicas"]
    report.table(
        f"{options['replicas']} engines with {options['places']} places each ({places} together, "
        f"{result['capacity_tokens_per_s']:,.0f} tokens/s when never short of requests); "
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
                way["tokens_per_s"],
                way["concurrency"],
                way["turn_p50_s"] * 1e3,
                way["cpu_us_per_turn"],
            )
            for name, way in result["ways"].items()
        ],
    )


def _print_depth(
    report: Report, engines: str, result: dict[str, Any], options: dict[str, Any]
) -> None:
    columns = {
        "first group s": "first_group_s",
        "first batch s": "first_batch_s",
        "all groups s": "seconds",
        "most samples at a time": "max_running",
        "tokens/s": "tokens_per_s",
    }
    report.table(
        f"{engines}: {options['items']} items, {options['group_size']} samples each, "
        f"{options['turns']} turns a sample; a batch has {options['batch']} groups",
        ("samples at a time", *columns),
        [(name, *(way[c] for c in columns.values())) for name, way in result["ways"].items()],
    )
    name = f"{engines}: engines busy between the first and the last batch"
    report.target(name, 0.95, result["busy"])
    name = f"{engines}: first batch, times one batch alone"
    report.target(name, 2.0, result["first_batch"], at_most=True)


def _compare(report: Report, results: dict[str, Any], away: str, peers: bool) -> None:
    ours, busy = results.get(_OURS), results.get(_BUSY)
    turns = 1e6 / ours["cpu_us"] if ours else None
    report.target("turns/s of a driver core, all threads", 20_000, turns)
    share = busy and busy["ways"]["as it adapts"]["busy"]
    report.target("engines busy, 1 of 4 agents 4 times slower", 0.95, share)
    if peers:
        rates = {name: results[name]["rate"] for name in (_OURS, away, _HTTP) if name in results}
        http = rates.pop(_HTTP, None)
        fastest = max(rates, key=lambda name: rates[name], default=_OURS)
        where = "" if fastest == _OURS else ", agents in processes"
        times = ratio(rates.get(fastest), http)
        report.target(f"times the turns/s over HTTP{where}", 10, times)


# --- a real engine ----------------------------------------------------------------------------


def _h200(report: Report, agents: int, repeats: int, on_gpu: bool) -> None:
    case = CASES["0.6b" if on_gpu else "tiny-cpu"]
    case = case._replace(in_flight=agents, new=64 if on_gpu else 16, repeats=repeats)
    options = {
        "turns": 4,
        "system": 512 if on_gpu else 128,
        "question": 64 if on_gpu else 32,
        "tool": 32 if on_gpu else 16,
        "tool_seconds": 0.05,
    }
    title = f"{agents} agents, {case.model}"
    plan = {title: partial(prefix_parts.prefix, case=case, **options)}
    result = report.measure(plan, env=case.environment).get(title)
    if result is not None:
        total = {key: sum(row[key] for row in result["by_turn"]) for key in result["by_turn"][0]}
        rows = {f"turn {n}": row for n, row in enumerate(result["by_turn"], 1)} | {"all": total}
        report.table(
            f"{case.model}: {agents} agents of {options['turns']} turns, a system prompt of "
            f"{options['system']} tokens, {options['question']} of a question, {case.new} new "
            f"and {options['tool']} of a tool a turn; {result['tokens_per_s']:,.0f} tokens/s, "
            f"start {result['start_s']:.3g} s",
            ("", "prompt tokens", "from the cache", "at best", "of the best"),
            [
                (name, *row.values(), f"{row['cached'] / row['ideal']:.2%}")
                for name, row in rows.items()
            ],
        )
    report.target("prefix-cache hits of the ideal", 0.9, result and result["of_ideal"])
    options |= {"agents": agents, "new": case.new, "repeats": repeats, "model": case.model}
    options |= {"device": case.device, "dtype": case.dtype, "arguments": case.arguments}
    report.finish(case="h200", options=options, results=result)


if __name__ == "__main__":
    typer.run(main)
