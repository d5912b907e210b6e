"""Run the whole check: model, workers, rollouts, logprob check, report."""

from __future__ import annotations

import time
from contextlib import AsyncExitStack

import msgspec
import uvloop
from rich.console import Console

from ... import __version__
from ...errors import UsageError
from ...launching.launch import launch
from ...launching.tiny_model import tiny_model
from ...wire.engine import EngineInfo
from ..display import is_live, quiet_transformers, stage, start_up
from ..logprob_check import compare, load_reference, tolerance_for
from .report import Report, make_report
from .rollouts import Rollout, run_rollouts
from .tasks import make_tasks

SAMPLES = 4
"""Number of rollouts per task."""


class CheckSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a check.

    Attributes:
        model: a folder, or a name on the hub. None: a tiny random Qwen3.
        tolerance: largest allowed difference of a logprob. None: the tolerance for the model's
            dtype (``logprob_check.tolerance_for``).
    """

    model: str | None = None
    rollouts: int = 512
    in_flight: int = 64
    replicas: int = 2
    device: str = "cpu"
    max_new_tokens: int = 32
    seed: int = 0
    tolerance: float | None = None

    def __post_init__(self) -> None:
        for name in ("rollouts", "in_flight", "replicas", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.seed < 0:
            raise UsageError(f"seed must be at least 0, got {self.seed}")


class _Measured(msgspec.Struct):
    """The rollouts of a check, with the engine that ran them and the times that they took."""

    rollouts: list[Rollout]
    info: EngineInfo
    start_seconds: float
    seconds: float


def run_check(settings: CheckSettings, console: Console) -> Report:
    """Run the whole check and show progress on ``console``. ``Report.passed`` is the verdict.

    Only the rollouts run on an event loop, so Ctrl-C stops every other part at once.
    """
    quiet_transformers()
    console.print(f"model: {settings.model or 'a tiny random Qwen3'}", highlight=False)
    model = settings.model or str(tiny_model())
    measured = uvloop.run(_sample(model, settings, console))
    # The workers have exited, so on a GPU their memory is free for the reference model.
    info = measured.info
    completions = [turn for rollout in measured.rollouts for turn in rollout.turns]
    with stage(console, "checking logprobs", len(completions)) as advance:
        check = compare(
            load_reference(model, info.device),
            completions,
            tolerance_for(info.dtype) if settings.tolerance is None else settings.tolerance,
            lambda: advance("against transformers"),
        )
    return make_report(
        measured.rollouts,
        check,
        seconds=measured.seconds,
        start_seconds=measured.start_seconds,
        sglrl_version=__version__,
        sglang_version=info.sglang_version,
        model=model,
        architecture=info.architecture,
        dtype=info.dtype,
        device=info.device.partition(":")[0],
        replicas=settings.replicas,
        in_flight=settings.in_flight,
        seed=settings.seed,
    )


async def _sample(model: str, settings: CheckSettings, console: Console) -> _Measured:
    tasks = make_tasks(-(-settings.rollouts // SAMPLES), settings.seed)
    begun = time.perf_counter()
    client = launch(
        model, replicas=settings.replicas, device=settings.device, progress=is_live(console)
    )
    async with AsyncExitStack() as stack:
        with start_up(console):
            await stack.enter_async_context(client)
        # Load the tokenizer here, so that its loading does not count as latency of a request.
        assert client.tokenizer is not None
        ready = time.perf_counter()
        tokens = 0
        with stage(console, "rollouts", settings.rollouts) as advance:

            def on_done(rollout: Rollout) -> None:
                nonlocal tokens
                tokens += sum(len(turn.output_ids) for turn in rollout.turns)
                advance(f"{tokens / (time.perf_counter() - ready):,.0f} tokens/s")

            rollouts = await run_rollouts(
                client,
                tasks,
                samples=SAMPLES,
                limit=settings.rollouts,
                in_flight=settings.in_flight,
                max_new_tokens=settings.max_new_tokens,
                seed=settings.seed,
                on_done=on_done,
            )
        seconds = time.perf_counter() - ready
        return _Measured(rollouts, client.info, ready - begun, seconds)
