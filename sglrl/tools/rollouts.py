"""``sglrl rollouts``: show what files of trajectories contain."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from .display import print_json, quiet_warnings


def rollouts(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE", help="Files that sglrl.rollouts.save wrote.")
    ],
    samples: Annotated[
        int,
        typer.Option(
            "--samples", "-n", min=0, help="Samples to show, from the best to the worst reward."
        ),
    ] = 3,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Model whose tokenizer decodes the samples.",
            show_default="token ids",
        ),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print the summary as one JSON object.")
    ] = False,
) -> None:
    """Summarize saved trajectories: rewards, lengths, policy versions, times and samples.

    \b
    Example:
      sglrl rollouts step_*.traj --tokenizer Qwen/Qwen3-0.6B
    """
    from ..inference.tokens import TokenizerBox
    from ..launching.local_models import local_model
    from .rollout_summary import summarize, table_of

    quiet_warnings()
    decoder = None
    if tokenizer is not None and samples:
        decoder = TokenizerBox(local_model(tokenizer)).tokenizer
    summary = summarize(files, samples, decoder)
    if json:
        print_json(msgspec.json.format(msgspec.json.encode(summary)))
    elif not summary.trajectories:
        Console().print("no trajectories: nothing was saved in the given files", highlight=False)
    else:
        Console().print(table_of(summary))
