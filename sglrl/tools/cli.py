"""The ``sglrl`` command, with a subcommand in each module of this package.

The exit code is 0 after success, 1 if a check or the engine failed, 2 after wrong usage, and 130
after Ctrl-C.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import msgspec
import typer
from rich.console import Console

from ..config import __version__, install
from ..errors import SglrlError, UsageError
from ..inference.sampling import SamplingParams
from .call import call
from .display import print_json, quiet_warnings
from .eval.command import evaluate
from .node import node
from .options import (
    Device,
    Engine,
    Json,
    Model,
    Replicas,
    Set,
    TpSize,
    check_target,
    launch_arguments,
)
from .rollouts import rollouts
from .sampling_options import sampling_options
from .serve import serve
from .top.command import top
from .view.command import view

_F = TypeVar("_F", bound=Callable[..., Any])

app = typer.Typer(
    name="sglrl",
    add_completion=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


def _complain(what: str) -> None:
    Console(stderr=True).print(
        f"error: {what}", style="red", markup=False, highlight=False, soft_wrap=True
    )


_EXTRAS: Final = {
    "demo": ("matplotlib", "tensordict"),
    "gateway": ("httptools", "httpx", "jinja2", "prometheus_client", "starlette", "uvicorn"),
    "parquet": ("pyarrow",),
    "ray": ("ray",),
    "renderers": ("renderers",),
    "top": ("textual", "textual_serve"),
    "view": ("starlette", "uvicorn"),
    "traces": ("opentelemetry",),
    "sglang": ("safetensors", "sglang", "torch", "transformers"),
}
"""The modules that each extra of sglrl installs."""


def _remedy(error: Exception) -> str:
    """Return the end of an error message: how to install a missing module, or "" if unknown."""
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    module = (missing or "").partition(".")[0]
    if module in ("sglrl", "sglrl_workers"):
        return "; this installation of sglrl is incomplete: install sglrl again"
    extras = [extra for extra, modules in _EXTRAS.items() if module in modules]
    return f"; {install(extras[0])}" if extras else ""


def _show_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"sglrl {__version__}\n")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Actors and SGLang workers for reinforcement learning of language models."""


def _command(function: _F, name: str | None = None) -> _F:
    """Register a command that reports errors as one line, not as a traceback.

    Args:
        function: the function of the command.
        name: the name of the command. None: the name of the function.
    """

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            function(*args, **kwargs)
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
        except SglrlError as error:
            _complain(str(error))
            raise typer.Exit(2 if isinstance(error, UsageError) else 1) from None
        except BrokenPipeError:
            raise
        except (OSError, ImportError) as error:
            _complain(f"{error}{_remedy(error)}")
            raise typer.Exit(1) from None

    app.command(name)(run)
    return function


@_command
def demo(
    task: Annotated[
        list[str] | None, typer.Option(help="repeat or lookup.", show_default="both")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Maximum number of weight updates.")] = 150,
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights, questions and sampling.")] = 0,
    replicas: Replicas = 1,
    max_staleness: Annotated[
        int, typer.Option(min=0, help="Maximum age of tokens, in versions; 0: no running ahead.")
    ] = 1,
    within: Annotated[
        float, typer.Option(min=0.0, help="Seconds until the goal must be reached.")
    ] = 240.0,
    compare: Annotated[
        bool, typer.Option(help="Also time some steps with running ahead, and without.")
    ] = True,
    plot: Annotated[
        Path, typer.Option(metavar="FILE", help="File of the plot of rewards, a PNG.")
    ] = Path("demo/reward.png"),
    trajectories: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="File to save the trajectories of the training in, for sglrl view."
        ),
    ] = None,
    json: Json = None,
) -> None:
    """Train a tiny model from random weights, with rollouts on a real SGLang.

    Needs no download and no GPU. Exits with 1 if the reward does not rise to 0.8 of the maximum
    in time, if waiting for every batch is no slower than running ahead, or if a logprob differs
    from what Hugging Face transformers computes with the weights of its policy version.
    """
    # Without this check, the command would run for minutes before a missing module makes it fail.
    for module in ("matplotlib", "tensordict"):
        if importlib.util.find_spec(module) is None:
            raise UsageError(f"the demo needs {module}: {install('demo')}")
    check_target("--json", json)
    check_target("--plot", plot, makes_folder=True)
    check_target("--trajectories", trajectories, makes_folder=True)

    from .demo.report import save_plot, table_of
    from .demo.run import DemoSettings, run_demo
    from .demo.tasks import TASKS

    report = run_demo(
        DemoSettings(
            tasks=tuple(task or TASKS),
            steps=steps,
            seed=seed,
            replicas=replicas,
            max_staleness=max_staleness,
            goal_within=within,
            compare=compare,
            trajectories=trajectories,
        ),
        Console(stderr=True),
    )
    Console().print(table_of(report))
    if json is not None:
        json.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    save_plot(report, plot)
    Console().print(f"plot: {plot}", highlight=False, soft_wrap=True)
    if report.failures:
        raise typer.Exit(1)


@_command
def check(
    rollouts: Annotated[int, typer.Option(min=1, help="Conversations to sample.")] = 512,
    in_flight: Annotated[int, typer.Option(min=1, help="Conversations at a time.")] = 64,
    replicas: Replicas = 2,
    device: Device = "cpu",
    model: Annotated[
        str | None,
        typer.Option(
            help="A folder or a name on the Hugging Face hub.",
            show_default="a tiny random Qwen3, made here",
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of the questions and of the sampling.")
    ] = 0,
    max_new_tokens: Annotated[
        int, typer.Option(min=1, help="Maximum number of tokens of an answer.")
    ] = 32,
    tolerance: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="Largest allowed difference of a logprob.",
            show_default="1e-4 for float32, 3e-2 for 16 bits",
        ),
    ] = None,
    json: Json = None,
) -> None:
    """Run hundreds of rollouts on SGLang workers and check every logprob.

    Needs no download and no GPU. Exits with 1 if a logprob differs from what Hugging Face
    transformers computes for the same tokens by more than the tolerance.
    """
    from .check.report import table_of
    from .check.run import CheckSettings, run_check

    check_target("--json", json)
    report = run_check(
        CheckSettings(
            model=model,
            rollouts=rollouts,
            in_flight=in_flight,
            replicas=replicas,
            device=device,
            max_new_tokens=max_new_tokens,
            seed=seed,
            tolerance=tolerance,
        ),
        Console(stderr=True),
    )
    Console().print(table_of(report))
    if json is not None:
        json.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    if not report.passed:
        raise typer.Exit(1)


@_command
@sampling_options
def generate(
    *,
    model: Model,
    prompts: Annotated[
        list[str] | None,
        typer.Argument(
            help="Texts to continue. Without any, each line of standard input is a prompt."
        ),
    ] = None,
    sampling: SamplingParams,
    n: Annotated[int, typer.Option("--samples", "-n", min=1, help="Samples per prompt.")] = 1,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat", help="Treat a prompt as a user's message and apply the chat template."
        ),
    ] = False,
    logprobs: Annotated[
        bool, typer.Option("--logprobs", help="With --json: add the logprob of each token.")
    ] = (False),
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object per sample.")] = False,
    replicas: Replicas = 1,
    tp_size: TpSize = 1,
    device: Device = "auto",
    engine: Engine = "sglang",
    settings: Set = None,
) -> None:
    """Sample continuations and print them, in the order of the prompts."""
    import uvloop

    from ..inference.completion import Completion
    from ..launching.launch import launch

    if not prompts:
        prompts = [line.rstrip("\r\n") for line in sys.stdin]
        if "" in prompts:
            raise UsageError(f"line {prompts.index('') + 1} of standard input is empty")
        _refuse_items(prompts)
    if not prompts:
        raise UsageError("there is no prompt: give one as an argument, or lines on standard input")
    if logprobs and not json:
        raise UsageError("--logprobs needs --json")
    inputs: dict[str, Any] = {"prompt": prompts}
    if chat:
        inputs = {"messages": [[{"role": "user", "content": text}] for text in prompts]}
    client = launch(
        model,
        replicas=replicas,
        tp_size=tp_size,
        device=device,
        engine=engine,
        **launch_arguments(settings),
    )

    async def sample() -> list[Completion]:
        async with client:
            result = await client.generate(**inputs, n=n, logprobs=logprobs, sampling=sampling)
        return [c for group in result for c in group] if n > 1 else result

    quiet_warnings()
    for i, completion in enumerate(uvloop.run(sample())):
        if json:
            print_json(msgspec.json.encode(_as_json(prompts[i // n], completion)))
        else:
            sys.stdout.write(completion.text + "\n")


_command(evaluate, "eval")
_command(node)
_command(serve)
_command(call)
_command(top)
_command(rollouts)
_command(view)


@_command
def doctor(
    engine: Annotated[
        str, typer.Option(help="Engine of the test call: fake, or sglang with a tiny model.")
    ] = "fake",
    hosts: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Test the connection of nodes instead, at tcp://HOST:PORT: on the program's "
            "machine with its keys, or on a node's machine with the node's keys.",
        ),
    ] = None,
    keys: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="For --hosts: the folder of the program, or the folder or secret key of a node.",
        ),
    ] = None,
    nodes: Annotated[
        list[str] | None,
        typer.Option(
            "--node",
            metavar="ADDRESS",
            help="For --hosts on the program's side: the address of a node that listens; "
            "may be repeated.",
        ),
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=1.0, help="How long --hosts waits for nodes to connect.")
    ] = 15.0,
    arguments: Annotated[
        bool,
        typer.Option(
            "--arguments", help="List the arguments of the installed SGLang instead, with states."
        ),
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print a JSON array.")] = False,
) -> None:
    """Show versions, devices and patches of SGLang, and make one call to test whether it works."""
    from ..launching.engine_arguments import check_engine
    from .doctor import argument_lines, argument_rows, examine, table_of
    from .doctor_hosts import examine_hosts

    check_engine(engine)
    quiet_warnings()
    if arguments:
        rows = argument_rows()
        if json:
            print_json(msgspec.json.format(msgspec.json.encode(rows)))
        else:
            sys.stdout.write(argument_lines(rows))
        return
    if hosts is None:
        findings = examine(engine)
    else:
        findings = examine_hosts(hosts, keys, seconds, nodes or ())
    if json:
        print_json(msgspec.json.format(msgspec.json.encode(findings)))
    else:
        Console().print(table_of(findings))
    if not all(finding.ok for finding in findings):
        raise typer.Exit(1)


@_command
def keys(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="The folder. It is made if it does not exist.")
    ],
    add: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Add keys for one more client to a folder with keys."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace existing keys.")] = False,
) -> None:
    """Make the keys that connections beyond this machine need.

    DIR is for the program that calls launch, which accepts every client
    whose .public file is in DIR. After a file is removed, the next start
    rejects its owner.

    \b
    Example, of a trainer on another host:
      sglrl keys ~/keys
      launch(model, address="tcp://0.0.0.0:*", keys="~/keys")
      Sender.connect(client.weights_address, keys=...)
    """
    from ..transport.curve_keys import DRIVER, add_client, make_keys

    made = make_keys(folder, force=force) if add is None else add_client(folder, add, force=force)
    folder = made[0].parent
    client = made[-1].stem
    lines = [f"made in {folder}: {', '.join(path.name for path in made)}"]
    if add is None:
        lines += [
            f"{DRIVER}.secret stays here. In the program that has the workers:",
            f'  launch(..., hosts=sglrl.Hosts("tcp://0.0.0.0:7000", keys={str(folder)!r}))',
            "or, for clients and senders of weights only:",
            f'  launch(..., address="tcp://0.0.0.0:*", keys={str(folder)!r})',
        ]
    lines += [
        f"Copy {client}.secret and {DRIVER}.public into a folder on the other machine, over a",
        "connection that you trust (a program on this machine finds them here). There:",
        f"  sglrl node tcp://HOST:PORT --keys FOLDER/{client}.secret",
        "or, to send weights:",
        f'  Sender.connect(client.weights_address, keys="FOLDER/{client}.secret")',
    ]
    sys.stdout.write("\n".join(lines) + "\n")


def _refuse_items(lines: list[str]) -> None:
    """Raise ``UsageError`` if a line is an item of ``sglrl eval``: a JSON object with a prompt."""
    from .eval.items import prompt_fields

    for number, line in enumerate(lines, 1):
        try:
            fields = msgspec.json.decode(line, type=dict[str, Any])
        except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError):
            continue
        for name in prompt_fields(fields):
            raise UsageError(
                f"line {number} of standard input is a JSON object with {name!r}, and generate "
                "takes lines as text; for a jsonl file use: sglrl eval MODEL --input FILE "
                "--output FILE"
            )


def _as_json(prompt: str, completion: Any) -> dict[str, Any]:
    logprobs = completion.logprobs
    return {
        "prompt": prompt,
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "prompt_tokens": len(completion.prompt_ids),
        "cached_tokens": completion.cached_tokens,
        "output_ids": completion.output_ids.tolist(),
        "logprobs": None if logprobs is None else logprobs.tolist(),
        "worker": completion.worker,
        "seconds": completion.timing.total,
    }
