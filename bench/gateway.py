"""``python -m bench.gateway``: what HTTP costs, and the gateway beside SGLang's own server."""

from __future__ import annotations

import json as json_module
import shutil
import statistics
from contextlib import ExitStack
from enum import Enum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from .cases import CASES, engine_arguments, environment, model_folder
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

_PARTS = "bench.gateway_parts"
_SYSTEMS = {"sglrl": "sglrl gateway", "sglang": "SGLang HTTP server"}
_IN_FLIGHT = (1, 64, 512, 1024)
CaseName = Enum("CaseName", {name: name for name in CASES})  # type: ignore[misc]


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
        list[int], typer.Option(min=1, help="Requests in flight; repeatable.")
    ] = list(_IN_FLIGHT),  # noqa: B006
    bench_serving: Annotated[
        bool, typer.Option(help="Compare with the load of sglang.bench_serving.")
    ] = False,
    processes: Annotated[
        int, typer.Option(min=1, help="Of the gateway beside SGLang's server.")
    ] = 1,
    conversations: Annotated[int, typer.Option(min=1, help="Of 5 turns, for the cost.")] = 400,
    repeat: Annotated[int, typer.Option(min=1, help="Repetitions of the cost.")] = 3,
    json: Annotated[Path | None, typer.Option(help="Write all figures to this file.")] = None,
    limit: Annotated[float, typer.Option(help="Seconds one system may take.")] = 600.0,
) -> None:
    """Measure what HTTP costs a turn, and compare tokens/s and time to the first token."""
    cases = [CASES[c.value] for c in case or []]
    info, found = machine(), dict[str, Any]()
    failed: dict[str, str] = {}
    with ExitStack() as stack, steps(cost + len(cases) * len(_SYSTEMS)) as (begin, note):

        def run(title: str, part: str, options: dict[str, Any], env: dict[str, str]) -> Any:
            begin(title)
            try:
                return run_part(_PARTS, part, options, note, limit, env)
            except PartFailed as failure:
                failed[title] = str(failure)
                print_note(f"{title} failed: {failure}\n{failure.log}")
                return None

        if cost:
            load = {"requests": conversations, "turns": 5, "in_flight": 64, "words": 32, "new": 64}
            found["cost"] = run("CPU time", "cost", {**load, "repeats": repeat}, {})
        for one in cases:
            model = Path(stack.enter_context(TemporaryDirectory()))
            options = {
                "case": one,
                "model": _worded_model(model, model_folder(one)),
                "arguments": engine_arguments(one, {}),
                "apis": api or ["chat", "generate"],
                "in_flight": in_flight,
                "bench_serving": bench_serving,
                "processes": processes,
            }
            found[one.name] = {
                part: run(f"{one.name}: {title}", part, options, environment(one))
                for part, title in _SYSTEMS.items()
            }
    console.print(describe(info))
    targets = _cost_table(found["cost"]["rows"]) if found.get("cost") else []
    for one in cases:
        targets += _peers_table(one.name, found[one.name])
    if targets:
        print_targets(targets)
    write_json(
        json, {"bench": "gateway", "machine": info, "found": found, "failed": failed}, targets
    )
    if failed:
        raise typer.Exit(1)


def _worded_model(folder: Path, source: Path) -> str:
    """Make a model with a word for each token, so that each sampled token has a text.

    Args:
        source: the folder of a model, whose configuration and weights it gets.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from sglrl.api.tiny_model import CHAT_TEMPLATE

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
    return str(folder)


def _cost_table(rows: list[dict[str, float]]) -> list[Target]:
    median = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    beyond = statistics.median(row["gateway_us"] - row["direct_us"] for row in rows)
    table(
        "CPU time of a turn, us",
        ("gateway process", "the same without HTTP", "difference", "turns/s"),
        [
            (
                number(median["gateway_us"]),
                number(median["direct_us"]),
                number(beyond),
                number(median["turns_per_s"]),
            )
        ],
    )
    return [Target("CPU beyond generate, rendering, parsing", 400, beyond, "us/turn", True)]


def _peers_table(case: str, found: dict[str, Any]) -> list[Target]:
    rows, targets = [], []
    for part, title in _SYSTEMS.items():
        for api, loads in (found[part] or {}).items():
            for in_flight, load in loads.items():
                rows.append(
                    (
                        title,
                        f"{api}, {in_flight} in flight",
                        number(load["tokens"] / load["seconds"]),
                        number(load["first_p50"] * 1e3),
                        number(load["first_p99"] * 1e3),
                        number(load["whole_p50"] * 1e3),
                    )
                )
    columns = ("system", "load", "tokens/s", "first token p50 ms", "p99 ms", "whole p50 ms")
    table(case, columns, rows)
    if not all(found.values()):
        return []
    for api, loads in found["sglrl"].items():
        for in_flight, ours in loads.items():
            theirs = found["sglang"][api][in_flight]
            rate = ours["tokens"] / ours["seconds"] * theirs["seconds"] / theirs["tokens"]
            first = ours["first_p50"] / theirs["first_p50"]
            name = f"{case} {api}, {in_flight} in flight"
            targets.append(Target(f"{name}: tokens/s of SGLang's", 1.0, rate, "x"))
            targets.append(Target(f"{name}: first token of SGLang's", 1.0, first, "x", True))
    return targets


if __name__ == "__main__":
    typer.run(main)
