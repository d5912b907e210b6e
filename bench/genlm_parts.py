"""The systems that ``bench.genlm`` measures, each in its own process.

genlm-backend's classes run unchanged and with their defaults. There are two exceptions. No
vocabulary is fetched from the hub. On a CPU, SGLang receives the arguments that it needs there.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from .cases import gpu_arguments
from .parts import Note

Ask = Callable[[list[int]], Awaitable[Any]]
PREFIXES = ("shared", "disjoint")
PROMPT_TOKENS = 32
NEW_TOKENS = 8
"""Number of tokens that a task appends to its prompt."""
_TICK = 0.001
"""Seconds between checks of the event loop's clock."""
_TURN = 16
"""Number of prompts and tasks that are made before the event loop runs again. Making 512 at once
would block the event loop for longer than the queries that are measured."""


def _prompt(kind: str, repetition: int, task: int, vocab: int) -> list[int]:
    """Return a prompt. All prompts of a repetition differ, "shared" ones only in the last two."""
    salt = repetition * 31 if kind == "shared" else repetition * 31 + task * 977
    begin = [(salt + 7 * i * i + 13 * i) % vocab for i in range(PROMPT_TOKENS - 2)]
    return [*begin, task // vocab % vocab, task % vocab]


async def _extend(ask: Ask, ids: list[int], task: int, vocab: int) -> None:
    for i in range(NEW_TOKENS):
        await ask(ids)
        # genlm also passes a new list in each query.
        ids = [*ids, (task + 11 * i) % vocab]


async def measure(
    ask: Ask, vocab: int, note: Note, *, tasks: Sequence[int], seconds: float
) -> dict[str, dict[str, Any]]:
    """Measure queries per second, and for how long the caller's event loop was blocked.

    Args:
        ask: makes one query.
        vocab: size of the vocabulary.
        note: shows the user what runs.
        tasks: for each measurement, the number of tasks that ask at the same time.
        seconds: minimum time of a measurement, without the warm-up.

    Returns:
        The figures by kind of prefix and number of tasks.
    """
    repetition = 0
    figures: dict[str, dict[str, Any]] = {kind: {} for kind in PREFIXES}
    for kind, count in itertools.product(PREFIXES, tasks):
        note(f"{kind} prefixes, {count} tasks")
        rates: list[float] = []
        watch = _Watch()
        spent = 0.0
        for measured in range(1000):
            repetition += 1
            if measured == 1:
                # Collect garbage before the loop is watched. With torch loaded, this takes a
                # second.
                gc.collect()
                watch.begin()
            prompts = []
            for task in range(count):
                prompts.append(_prompt(kind, repetition, task, vocab))
                if task % _TURN == _TURN - 1:
                    await asyncio.sleep(0)
            begun = time.perf_counter()
            running = []
            for task, prompt in enumerate(prompts):
                running.append(asyncio.ensure_future(_extend(ask, prompt, task, vocab)))
                if task % _TURN == _TURN - 1:
                    await asyncio.sleep(0)
            await asyncio.gather(*running)
            took = time.perf_counter() - begun
            if measured:
                rates.append(count * NEW_TOKENS / took)
                spent += took
            if spent > seconds and len(rates) >= 2:
                break
        figures[kind][str(count)] = {
            "queries_per_s": statistics.median(rates),
            "all_queries_per_s": rates,
            "blocked_ms": watch.end() * 1e3,
        }
    return figures


class _Watch:
    """Measures the longest time for which the event loop was blocked."""

    def begin(self) -> None:
        self._longest = 0.0
        self._task = asyncio.ensure_future(self._look())

    async def _look(self) -> None:
        while True:
            due = time.perf_counter() + _TICK
            await asyncio.sleep(_TICK)
            self._longest = max(self._longest, time.perf_counter() - due)

    def end(self) -> float:
        self._task.cancel()
        return self._longest


def _engine_arguments(device: str) -> dict[str, Any]:
    """Return the ``ServerArgs`` for both systems that run SGLang."""
    return {"device": device, **(gpu_arguments() if device == "cuda" else {})}


def sglrl(note: Note, *, model: str, device: str, **load: Any) -> dict[str, Any]:
    from sglrl.integrations.genlm import AsyncSGLTransformer

    note("starting")
    with AsyncSGLTransformer.from_name(model, engine_opts=_engine_arguments(device)) as made:
        vocab = made.client.info.vocab_size
        return asyncio.run(measure(made.next_token_logprobs, vocab, note, **load))


def _without_vocabulary() -> None:
    import genlm.backend.llm.base as base

    # The original function fetches GPT-2's tokenizer from the hub.
    base.decode_vocab = lambda tokenizer: ([], [])


def genlm_sgl(note: Note, *, model: str, device: str, **load: Any) -> dict[str, Any]:
    note("starting")
    from genlm.backend.llm.sgl import AsyncSGLTransformer

    _without_vocabulary()
    arguments = _engine_arguments(device) | {"log_level": "warning"}
    if device == "cpu":
        from . import sglang_cpu

        sglang_cpu.prepare()
        arguments |= sglang_cpu.cpu_arguments()
    made = AsyncSGLTransformer.from_name(model, engine_opts=arguments)
    vocab = made.model.model_config.vocab_size
    return asyncio.run(measure(made.next_token_logprobs, vocab, note, **load))


def genlm_hf(note: Note, *, model: str, device: str, **load: Any) -> dict[str, Any]:
    note("starting")
    from genlm.backend.llm.hf import AsyncTransformer
    from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

    _without_vocabulary()
    if not hasattr(DynamicCache, "from_legacy_cache"):
        # The method is part of transformers 4. genlm-backend calls it without a cache only.
        DynamicCache.from_legacy_cache = staticmethod(lambda past: None if past is None else past)
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype="auto").to(device)
    made = AsyncTransformer(loaded, AutoTokenizer.from_pretrained(model))
    vocab = loaded.config.vocab_size
    return asyncio.run(measure(made.next_token_logprobs, vocab, note, **load))
