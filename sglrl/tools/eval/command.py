"""Declare the options of the command ``sglrl eval``, and run it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console

from ...errors import UsageError
from ...inference.sampling import SamplingParams
from ...wire.codec import malformed
from ..display import print_json, quiet_warnings
from ..options import Device, Engine, Model, Replicas, Set, TpSize, check_target, launch_arguments
from ..sampling_options import sampling_options


@sampling_options
def evaluate(
    *,
    model: Model,
    input: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            exists=True,
            dir_okay=False,
            help="File with a JSON object per line, with prompt, messages or input_ids.",
        ),
    ],
    output: Annotated[
        Path,
        typer.Option(metavar="FILE", help="File of the results. If it exists, the run continues."),
    ],
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Begin anew instead of continuing.")
    ] = False,
    n: Annotated[int, typer.Option("--samples", "-n", min=1, help="Samples per line.")] = 1,
    score: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="The function score(item, text), which returns a float or a bool.",
        ),
    ] = None,
    agent: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="Instead of --score: the agent(session, item) of a rollout, for several turns.",
        ),
    ] = None,
    gateway: Annotated[
        bool,
        typer.Option("--gateway", help="The --agent uses session.base_url and session.api_key."),
    ] = False,
    k: Annotated[
        list[int] | None,
        typer.Option(
            min=1,
            help="The k of pass@k; may be repeated.",
            show_default="1, 2, 4, ... up to the samples",
        ),
    ] = None,
    sampling: SamplingParams,
    logprobs: Annotated[
        bool, typer.Option("--logprobs", help="Write the id and logprob of each token.")
    ] = False,
    template: Annotated[
        str | None, typer.Option(metavar="JSON", help="Arguments of the chat template.")
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(
            min=1, help="Samples in flight.", show_default="as many as the engines run at once"
        ),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print the summary as one JSON object.")
    ] = False,
    replicas: Replicas = 1,
    tp_size: TpSize = 1,
    device: Device = "auto",
    engine: Engine = "sglang",
    settings: Set = None,
) -> None:
    """Sample every line of a jsonl file, score the samples, and print a summary with pass@k.

    After a kill, the same command continues. Finished lines are not sampled again.

    \b
    Example:
      sglrl eval Qwen/Qwen3-0.6B --input problems.jsonl --output results.jsonl \\
        --samples 8 --score rewards:exact
    """
    from .run import EvalSettings, run_eval
    from .summary import table_of

    check_target("--output", output)
    quiet_warnings()
    summary = run_eval(
        EvalSettings(
            model=model,
            input=input,
            output=output,
            samples=n,
            sampling=sampling,
            logprobs=logprobs,
            template=_json_object("--template", template),
            score=score,
            agent=agent,
            gateway=gateway,
            k=tuple(k or ()),
            concurrency=concurrency,
            replicas=replicas,
            tp_size=tp_size,
            device=device,
            engine=engine,
            more=launch_arguments(settings),
            overwrite=overwrite,
        ),
        Console(stderr=True),
    )
    if json:
        print_json(msgspec.json.format(msgspec.json.encode(summary)))
    else:
        Console().print(table_of(summary))


def _json_object(option: str, text: str | None) -> dict[str, Any] | None:
    """Decode the value of an option. Raise ``UsageError`` unless it is a JSON object."""
    try:
        return None if text is None else msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        why = malformed(error, text or "")
        raise UsageError(f"{option} must be a JSON object, got {text!r:.200}: {why}") from None
