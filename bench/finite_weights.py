"""``python -m bench.finite_weights``: measure how long the check for finite weights takes.

By default, the weights are on a GPU and have the shapes of Qwen3 8B: 16 GB of bfloat16.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Annotated

import torch
import typer

from sglrl.weights.finite import FiniteCheck

from .report import Report

LAYER = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (12288, 4096), (12288, 4096),
         (4096, 12288), (4096,), (4096,), (128,), (128,)]  # fmt: skip
"""The shapes of one layer's tensors: q, k, v, o, gate, up, down and four norms."""
ENDS = [(151_936, 4096), (151_936, 4096), (4096,)]


def main(
    device: Annotated[str, typer.Option(help="Where the weights are.")] = "cuda",
    layers: Annotated[int, typer.Option(min=1, help="Of the model; 36 make 16 GB.")] = 36,
    rounds: Annotated[int, typer.Option(min=1, help="The median counts.")] = 20,
) -> None:
    """Measure the milliseconds of the check, and of other ways to check."""
    shapes = [*LAYER * layers, *ENDS]
    tensors = [torch.full(s, 0.02, dtype=torch.bfloat16, device=device) for s in shapes]
    size = sum(tensor.nbytes for tensor in tensors)
    report = Report("finite_weights", None)

    def checked() -> None:
        check = FiniteCheck()
        check.add((str(i), tensor, tensor.dtype) for i, tensor in enumerate(tensors))
        check.finish()

    ways: dict[str, Callable[[], object]] = {
        "sglrl's check": checked,
        "foreach norm": lambda: torch.stack(torch._foreach_norm(tensors, math.inf)).tolist(),
        "norm": lambda: torch.stack(
            [torch.linalg.vector_norm(t, math.inf) for t in tensors]
        ).tolist(),
        "aminmax": lambda: torch.stack([torch.stack(torch.aminmax(t)) for t in tensors]).tolist(),
        "sum": lambda: torch.stack([t.sum() for t in tensors]).tolist(),
        "isfinite": lambda: torch.stack([t.isfinite().all() for t in tensors]).tolist(),
    }
    rows = []
    for name, way in ways.items():
        way()
        took = []
        for _ in range(rounds):
            begun = time.perf_counter()
            way()
            took.append((time.perf_counter() - begun) * 1e3)
        ms = statistics.median(took)
        rows.append((name, ms, size / ms / 1e9))
    report.table(
        f"{len(tensors)} tensors, {size / 1e9:.2f} GB on {device}", ("", "ms", "TB/s"), rows
    )
    # The check must find one bad value anywhere, on a GPU and on a CPU.
    for value in (math.nan, math.inf, -math.inf):
        for tensor in (tensors[0], tensors[-1]):
            tensor.view(-1)[-1] = value
            try:
                checked()
            except ValueError:
                tensor.view(-1)[-1] = 0.02
            else:
                raise SystemExit(f"{value} was not found")


if __name__ == "__main__":
    typer.run(main)
