"""``python -m bench.gateway``: measure what HTTP costs a turn.

The bench also compares the gateway with SGLang's own HTTP server.
"""

from __future__ import annotations

import json as json_module
import shutil
import statistics
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from . import gateway_parts
from .cases import CASES, CaseName
from .report import Json, Report

_OURS, _THEIRS = "sglrl gateway", "SGLang HTTP server"
_PARTS = {_OURS: "sglrl", _THEIRS: "sglang"}
"""The names of the systems in the file of ``--json``."""


def main(
    case: Annotated[
        list[CaseName] | None,
        typer.Option(help="Compare with SGLang's server; all but tiny-cpu need a GPU; repeatable."),
    ] = None,
    cost: Annotated[bool, typer.Option(help="Measure the CPU time of the gateway.")] = True,
    api: Annotated[
        list[str] | None, typer.Option(help="chat or generate; repeatable. Both.")
    ] = None,
    in_flight: Annotated[
        list[int] | None, typer.Option(min=1, help="Repeatable; 1, 64, 512 and 1,024 by default.")
    ] = None,
    bench_serving: Annotated[
        bool, typer.Option(help="Compare with the load of sglang.bench_serving.")
    ] = False,
    processes: Annotated[
        int, typer.Option(min=1, help="Of the gateway beside SGLang's server.")
    ] = 1,
    conversations: Annotated[int, typer.Option(min=1, help="Of 5 turns, for the cost.")] = 400,
    repeat: Annotated[int, typer.Option(min=1, help="Repetitions of the cost.")] = 3,
    json: Json = None,
) -> None:
    """Measure what HTTP costs a turn, and compare tokens/s and time to the first token."""
    report = Report("gateway", json)
    results: dict[str, Any] = {}
    if cost:
        load = {"requests": conversations, "turns": 5, "in_flight": 64, "words": 32, "new": 64}
        title = "CPU time"
        part = partial(gateway_parts.cost, **load, repeats=repeat)
        costs = report.measure({title: part}).get(title)
        if costs:
            results["cost"] = costs
            _print_cost(report, costs["rows"])
    for name in case or []:
        one = CASES[name.value]
        with TemporaryDirectory() as folder:
            _make_worded_model(Path(folder), Path(one.folder))
            loads = {
                "case": one,
                "folder": folder,
                "apis": api or ["chat", "generate"],
                "in_flight": in_flight or [1, 64, 512, 1024],
                "bench_serving": bench_serving,
            }
            plan = {
                _OURS: partial(gateway_parts.gateway, **loads, processes=processes),
                _THEIRS: partial(gateway_parts.sglang, **loads),
            }
            systems = report.measure(plan, env=one.environment, of=f"{one.name}: ")
        _print_systems(report, one.name, systems)
        results[one.name] = {_PARTS[title]: result for title, result in systems.items()}
    report.finish(found=results)


def _print_cost(report: Report, rows: list[dict[str, float]]) -> None:
    median = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    beyond = statistics.median(row["gateway_us"] - row["direct_us"] for row in rows)
    report.table(
        "CPU time of a turn, us",
        ("gateway process", "the same without HTTP", "difference", "turns/s"),
        [(median["gateway_us"], median["direct_us"], beyond, median["turns_per_s"])],
    )
    name = "CPU beyond generate, rendering, parsing"
    report.target(name, 400, beyond, "us/turn", at_most=True)


def _print_systems(report: Report, case: str, systems: dict[str, Any]) -> None:
    loads = {
        (title, f"{api}, {in_flight} in flight"): load
        for title, apis in systems.items()
        for api, levels in apis.items()
        for in_flight, load in levels.items()
    }
    speeds = {key: load["tokens"] / load["seconds"] for key, load in loads.items()}
    report.table(
        case,
        ("system", "load", "tokens/s", "first token p50 ms", "p99 ms", "whole p50 ms"),
        [
            (*key, speeds[key], *(load[f] * 1e3 for f in ("first_p50", "first_p99", "whole_p50")))
            for key, load in loads.items()
        ],
    )
    for (title, name), ours in loads.items():
        theirs = loads.get((_THEIRS, name))
        if title == _OURS and theirs:
            rate = speeds[title, name] / speeds[_THEIRS, name]
            first = ours["first_p50"] / theirs["first_p50"]
            report.target(f"{case} {name}: tokens/s of SGLang's", 1.0, rate, "x")
            report.target(f"{case} {name}: first token of SGLang's", 1.0, first, "x", at_most=True)


def _make_worded_model(folder: Path, source: Path) -> None:
    """Make a model whose tokenizer has a word for each token, so that each sampled token has text.

    Args:
        folder: the folder of the new model.
        source: the folder of a model whose configuration and weights are copied.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from sglrl.launching.tiny_model import CHAT_TEMPLATE

    for file in source.iterdir():
        if file.name == "config.json" or file.suffix == ".safetensors":
            shutil.copy(file, folder)
    size = json_module.loads((folder / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    words = {f"w{number}": number for number in range(size)}
    made = Tokenizer(models.WordLevel(words, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="w1")
    tokenizer.chat_template = CHAT_TEMPLATE.replace("<|im_start|>", " w2 ").replace(
        "<|im_end|>", " w3 "
    )
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    typer.run(main)
