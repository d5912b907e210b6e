"""Run an evaluation: read the items, sample the unfinished ones, write and summarize results."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import uvloop
from numpy.typing import NDArray
from rich.console import Console

from ...client.client import Client
from ...core.seeds import derived_seed
from ...errors import EngineError, UsageError
from ...inference.sampling import SamplingParams
from ...launching.launch import launch
from ..display import is_live, stage, start_up
from .items import Item, read_items
from .results import ResultsFile, Sample
from .scoring import Score
from .summary import Summary, powers_of_two, summarize


class EvalSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of an evaluation.

    Attributes:
        samples: number of samples per item.
        sampling: the sampling parameters. The first sample of the first line uses their seed. Every
            other sample uses a different seed that is derived from it.
        template: the arguments of the chat template.
        score: the score function, as "module:function". None: no scores.
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
    k: tuple[int, ...] = ()
    concurrency: int | None = None
    replicas: int = 1
    tp_size: int = 1
    device: str = "auto"
    engine: str = "sglang"
    more: dict[str, Any] = {}
    overwrite: bool = False

    def __post_init__(self) -> None:
        if self.k and self.score is None:
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
            **msgspec.to_builtins(self.sampling),
            **({"set": self.more} if self.more else {}),
        }


def run_eval(settings: EvalSettings, console: Console) -> Summary:
    """Run an evaluation and show its progress on ``console``.

    Raises:
        UsageError: an option or a line of the input is wrong. The error names the line.
        SglrlError: the engine or the score function failed. The finished items are in the output.
    """
    items = read_items(settings.input)
    for item in items:
        if settings.template and item.kind != "messages":
            raise UsageError(f"{item.place}: --template is for messages, and this is {item.kind}")
    score = None if settings.score is None else Score(settings.score)
    options = settings.result_options
    with ResultsFile(settings.output, options, items, overwrite=settings.overwrite) as results:
        left = [item for item in items if item.line not in results.finished]
        if len(left) < len(items):
            console.print(
                f"{len(items) - len(left):,} of {len(items):,} items are finished",
                highlight=False,
            )
        run = _Run(settings, left, results, score, console)
        if left:
            uvloop.run(run.start())
        return summarize(
            results.finished.values(),
            settings.k or powers_of_two(settings.samples),
            new_tokens=run.tokens,
            seconds=run.seconds,
        )


class _Run:
    """Samples the unfinished items, and writes their results."""

    def __init__(
        self,
        settings: EvalSettings,
        items: Sequence[Item],
        results: ResultsFile,
        score: Score | None,
        console: Console,
    ) -> None:
        self._settings = settings
        self._items = items
        self._results = results
        self._score = score
        self._console = console
        self._done = 0
        self._begun = 0.0
        self.tokens = 0
        self.seconds = 0.0

    async def start(self) -> None:
        s = self._settings
        client = launch(
            s.model,
            replicas=s.replicas,
            tp_size=s.tp_size,
            device=s.device,
            engine=s.engine,
            **{"progress": is_live(self._console), **s.more},
        )
        async with AsyncExitStack() as stack:
            with start_up(self._console):
                self._client: Client = await stack.enter_async_context(client)
                # Load the tokenizer here, so that its loading does not count as sampling.
                await asyncio.to_thread(lambda: client.tokenizer)
            # A worker's default window is twice the number of calls that its engine runs.
            at_once = sum(worker.window for worker in client.workers) // 2
            self._room = asyncio.Semaphore(s.concurrency or max(1, at_once))
            self._begun = time.perf_counter()
            with stage(self._console, "items", len(self._items)) as advance:
                await self._sample_items(advance)
            self.seconds = time.perf_counter() - self._begun

    async def _sample_items(self, advance: Callable[[str], None]) -> None:
        """Sample the items in order. The first failure cancels all samples and is raised."""
        try:
            async with asyncio.TaskGroup() as group:
                for item in self._items:
                    prompt = await self._encode(item)
                    samples = []
                    for i in range(self._settings.samples):
                        await self._room.acquire()
                        samples.append(group.create_task(self._sample(item, prompt, i)))
                    group.create_task(self._finish(item, samples, advance))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _encode(self, item: Item) -> NDArray[np.int32]:
        """Return the tokens of the item's prompt, which all of its samples share."""
        prompt = {"prompt": None, "input_ids": None, "messages": None}
        prompt[item.kind] = item.fields[item.kind]
        with _naming(item):
            requests = self._client.requests
            _, (ids,) = await requests.encode_prompts(**prompt, template=self._settings.template)
        return np.frombuffer(ids, "<i4")

    async def _sample(self, item: Item, prompt: NDArray[np.int32], number: int) -> Sample:
        """Make and score one sample, and then free its place for another sample."""
        s = self._settings
        seed = s.sampling.seed
        if seed is not None:
            seed = derived_seed(seed, item.line - 1, number)
        try:
            with _naming(item):
                made = await self._client.generate(
                    input_ids=prompt, logprobs=s.logprobs, sampling=s.sampling, seed=seed
                )
            return Sample(
                text=made.text,
                finish_reason=made.finish_reason,
                tokens=len(made.output_ids),
                score=None if self._score is None else await self._score(item, made.text),
                output_ids=made.output_ids.tolist() if s.logprobs else None,
                logprobs=None if made.logprobs is None else made.logprobs.tolist(),
            )
        finally:
            self._room.release()

    async def _finish(
        self, item: Item, tasks: Sequence[asyncio.Task[Sample]], advance: Callable[[str], None]
    ) -> None:
        """Wait for all samples of an item and write them."""
        samples = [await task for task in tasks]
        self._results.append(item, samples)
        self._done += 1
        self.tokens += sum(sample.tokens for sample in samples)
        passed = time.perf_counter() - self._begun
        left = round(passed / self._done * (len(self._items) - self._done))
        advance(f"{self.tokens / passed:,.0f} tokens/s, {timedelta(seconds=left)} left")


@contextmanager
def _naming(item: Item) -> Iterator[None]:
    """Add the place of the item in the input to an error that the block raises."""
    try:
        yield
    except (UsageError, EngineError) as error:
        raise type(error)(f"{item.place}: {error.message}") from error
