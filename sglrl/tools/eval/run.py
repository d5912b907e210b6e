"""Run an evaluation: read the items, sample the unfinished ones, write and summarize results."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import uvloop
from rich.console import Console

from ...errors import UsageError
from ...inference.sampling import SamplingParams
from ...launching.launch import launch
from ...rollouts.evaluation import Summary, powers_of_two, summarize
from ...rollouts.run import rollout
from ..display import is_live, stage, start_up
from .items import Item, read_items
from .results import ResultsFile
from .scoring import EvalAgent


class EvalSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of an evaluation.

    Attributes:
        samples: number of samples per item.
        sampling: the sampling parameters. The first sample of the first line uses their seed. Every
            other sample uses a different seed that is derived from it.
        template: the arguments of the chat template.
        score: the score function, as "module:function". None: no scores, unless there is an agent.
        agent: an agent for samples of several turns, as "module:function". Its reward is the score.
        gateway: whether the agent uses the session over HTTP. Items then need no prompt.
        k: the values of k for pass@k. Empty: the powers of two from 1 up to ``samples``.
        concurrency: maximum number of samples in flight. None: the number of calls that the engines
            run at once.
        more: other arguments of ``launch``.
    """

    model: str
    input: Path
    output: Path
    samples: int = 1
    sampling: SamplingParams
    logprobs: bool = False
    template: dict[str, Any] | None = None
    score: str | None = None
    agent: str | None = None
    gateway: bool = False
    k: tuple[int, ...] = ()
    concurrency: int | None = None
    replicas: int = 1
    tp_size: int = 1
    device: str = "auto"
    engine: str = "sglang"
    more: dict[str, Any] = {}
    overwrite: bool = False

    def __post_init__(self) -> None:
        if self.score is not None and self.agent is not None:
            raise UsageError("--score and --agent exclude each other: the agent returns the score")
        if self.gateway and self.agent is None:
            raise UsageError("--gateway needs --agent, the agent that uses HTTP")
        if self.k and self.score is None and self.agent is None:
            raise UsageError("--k needs --score: without scores there is no pass@k")
        for k in self.k:
            if not 1 <= k <= self.samples:
                raise UsageError(f"--k must be in 1..{self.samples}, the --samples, got {k}")
        if self.output.exists() and self.output.samefile(self.input):
            raise UsageError(f"--output {self.output} is the input; name another file")

    @property
    def result_options(self) -> dict[str, Any]:
        """The options that determine samples and scores. A run that continues must have them."""
        return {
            "model": self.model,
            "engine": self.engine,
            "samples": self.samples,
            "logprobs": self.logprobs,
            "template": self.template,
            "score": self.score,
            **({"agent": self.agent} if self.agent else {}),
            **msgspec.to_builtins(self.sampling),
            **({"set": self.more} if self.more else {}),
        }


def run_eval(settings: EvalSettings, console: Console) -> Summary:
    """Run an evaluation and show its progress on ``console``.

    Raises:
        UsageError: an option or a line of the input is wrong. The error names the line.
        SglrlError: the engine or the score function failed. The finished items are in the output.
    """
    items = read_items(settings.input, optional_prompt=settings.gateway)
    for item in items:
        if settings.template and item.kind != "messages":
            raise UsageError(f"{item.place}: --template is for messages, and this is {item.kind}")
    agent = EvalAgent(settings.score, settings.agent)
    options = settings.result_options
    with ResultsFile(settings.output, options, items, overwrite=settings.overwrite) as results:
        left = len(items) - len(results.finished)
        if left < len(items):
            done = len(items) - left
            console.print(f"{done:,} of {len(items):,} items are finished", highlight=False)
        tokens, seconds = 0, 0.0
        if left:
            tokens, seconds = uvloop.run(_sample_items(settings, items, results, agent, console))
        return summarize(
            results.finished.values(),
            settings.k or powers_of_two(settings.samples),
            new_tokens=tokens,
            seconds=seconds,
        )


async def _sample_items(
    settings: EvalSettings,
    items: list[Item],
    results: ResultsFile,
    agent: EvalAgent,
    console: Console,
) -> tuple[int, float]:
    """Sample the unfinished items, and write the results of each item when it is finished.

    Returns:
        The number of sampled tokens, and the seconds without the start of the engines.
    """
    s = settings
    pool = launch(
        s.model,
        replicas=s.replicas,
        tp_size=s.tp_size,
        device=s.device,
        engine=s.engine,
        **{"progress": is_live(console), **s.more},
    )
    async with AsyncExitStack() as stack:
        with start_up(console):
            client = await stack.enter_async_context(pool)
            # Load the tokenizer here, so that its loading does not count as sampling.
            await asyncio.to_thread(lambda: client.tokenizer)
        left = [index for index, item in enumerate(items) if item.line not in results.finished]
        run = rollout(
            client,
            agent,
            items,
            group_size=s.samples,
            min_group=s.samples,
            on_error="raise",
            concurrency=s.concurrency,
            open_session=_session,
            gateway=s.gateway,
            # An item keeps its index, from which its seed is derived.
            state={"next": len(items), "unfinished": left},
            progress=False,
            template=s.template,
            sampling=s.sampling,
        )
        tokens, begun = 0, time.perf_counter()
        with stage(console, "items", len(left)) as advance:
            done = 0
            async for group in run:
                item: Item = group.item
                results.append(item, agent.samples(group, logprobs=s.logprobs))
                done, tokens = done + 1, tokens + group.tokens
                passed = time.perf_counter() - begun
                rest = timedelta(seconds=round(passed / done * (len(left) - done)))
                advance(f"{tokens / passed:,.0f} tokens/s, {rest} left")
        return tokens, time.perf_counter() - begun


def _session(item: Item) -> dict[str, Any]:
    return {item.kind: item.fields[item.kind]} if item.kind else {}
