"""``python -m bench.trainers``: compare trainers on recipe 1.

Recipe 1 (``examples/recipes/sums.py``), TRL's ``GRPOTrainer`` and TorchRL's collector and loss
train the same model on the same items until the held-out score reaches a target.
"""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from sglrl.launching.tiny_model import tiny_model

from .parts import ROOT, Note
from .report import Json, Report, ratio

_OURS, _TRL, _TORCHRL = "sglrl", "TRL, transformers", "TorchRL, transformers"
_SYSTEMS = {_OURS: "sglrl", _TRL: "trl", _TORCHRL: "torchrl"}
"""The names of the systems, which are those of their folders, by title."""
_PEERS = (_TRL, _TORCHRL)
_START_SECONDS = 600.0
"""The longest start of a system, with its first evaluation and its last step."""


def main(
    json: Json = None,
    model: Annotated[
        str, typer.Option(help="A folder, a name on the hub, or smollm2.")
    ] = "smollm2",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cuda",
    target: Annotated[float, typer.Option(help="The held-out score that ends a run.")] = 0.8,
    seconds: Annotated[float, typer.Option(help="The longest run of a system.")] = 900.0,
    steps: Annotated[int, typer.Option(min=1, help="The most weight updates.")] = 400,
    groups: Annotated[int, typer.Option(min=1, help="Prompts of a step.")] = 32,
    samples: Annotated[int, typer.Option(min=2, help="Samples of a prompt.")] = 8,
    filter: Annotated[
        int, typer.Option(help="The recipe's; 1: replace groups of equal rewards.")
    ] = 0,
    lr: Annotated[float, typer.Option(help="Learning rate.")] = 2e-5,
    every: Annotated[int, typer.Option(min=1, help="Steps between evaluations.")] = 5,
    heldout: Annotated[int, typer.Option(min=1, help="Held-out items.")] = 64,
    seed: Annotated[int, typer.Option(help="Of the items, the samples and torch.")] = 0,
    engine: Annotated[str, typer.Option(help="More arguments of SGLang, as JSON.")] = "{}",
    system: Annotated[list[str] | None, typer.Option(help="sglrl, trl, torchrl.")] = None,
    output: Annotated[Path, typer.Option(help="The folder of the logs.")] = Path("runs/trainers"),
    plot: Annotated[Path | None, typer.Option(help="Draw the scores into this file.")] = None,
    quick: Annotated[bool, typer.Option(help="The tiny model, two steps on a CPU.")] = False,
) -> None:
    """Measure the time to a held-out score, tokens/s, and how busy the GPU is."""
    if quick:
        model, device = str(tiny_model()), "cpu"
        steps, groups, samples, every, heldout = 2, 2, 2, 1, 2
    if wrong := set(system or ()) - set(_SYSTEMS.values()):
        known = ", ".join(_SYSTEMS.values())
        raise typer.BadParameter(f"unknown system {', '.join(wrong)}, expected one of {known}")
    options: dict[str, Any] = {"model": model, "device": device, "steps": steps, "groups": groups}
    options |= {"samples": samples, "filter": filter, "lr": lr, "every": every}
    options |= {"heldout": heldout, "seed": seed, "engine": engine}
    given = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    limits = {"target": target, "seconds": seconds}
    output = output.absolute()
    for name in _SYSTEMS.values():
        # A recipe refuses to overwrite the log of another run.
        (output / name / "log.csv").unlink(missing_ok=True)
    report = Report("trainers", json)
    plan = {
        title: partial(
            train, name=name, arguments=[*given, "--output", str(output / name)], **limits
        )
        for title, name in _SYSTEMS.items()
        if not system or name in system
    }
    results = report.measure(plan, limit=seconds + _START_SECONDS)
    columns = ("startup_s", "train_s", "steps", "tokens_per_s", "sampling_tokens_per_s")
    report.table(
        f"held-out score {target} on {device}",
        (
            *("", "start s", "training s", "steps", "tokens/s", "while sampling", "GPU busy"),
            *("score", "reached"),
        ),
        [
            (
                title,
                *(result[name] for name in (*columns, "gpu_busy", "heldout")),
                "yes" if result["reached"] else "no",
            )
            for title, result in results.items()
        ],
    )
    times = {title: one["train_s"] for title, one in results.items() if one["reached"]}
    for peer in _PEERS:
        faster = ratio(times.get(peer), times.get(_OURS))
        report.target(f"times faster to the score than {peer}", 1.0, faster)
    if plot is not None and results:
        folders = [output / _SYSTEMS[title] for title in results]
        program = ROOT / "examples/recipes/log.py"
        given = ["--output", str(plot), "--title", "recipe 1"]
        subprocess.run([sys.executable, program, *folders, *given], check=True)
    report.finish(may_fail=_PEERS, options=options | limits, systems=results)


def train(note: Note, *, name: str, **arguments: Any) -> Any:
    """Train with a system. Only the process of the system imports torch."""
    from . import trainers_parts

    return getattr(trainers_parts, f"train_{name}")(note, **arguments)


if __name__ == "__main__":
    typer.run(main)
