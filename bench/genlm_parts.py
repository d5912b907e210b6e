"""The systems that ``bench.genlm`` measures, each in its own process.

genlm-backend's classes run unchanged, with their defaults, with two exceptions: no vocabulary is
looked up on the hub, and on a CPU SGLang gets the arguments that it needs to run there.
"""

from __future__ import annotations

import asyncio
import gc
import os
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from sglrl.api.engine_fields import engine_fields

from .cases import GPU_ARGUMENTS
from .parts import Note, serve_part

Ask = Callable[[list[int]], Awaitable[Any]]
_TICK = 0.001
"""Seconds between checks of the event loop's clock."""
_TURN = 16
"""How many prompts and tasks are made before the event loop runs again. Making 512 at once takes
asyncio longer than the queries, which are to be measured."""


def _prompt(kind: str, length: int, repetition: int, task: int, vocab: int) -> list[int]:
    """Return a prompt. All of one repetition differ; "shared" ones only in the last two tokens."""
    salt = repetition * 31 if kind == "shared" else repetition * 31 + task * 977
    begin = [(salt + 7 * i * i + 13 * i) % vocab for i in range(length - 2)]
    return [*begin, task // vocab % vocab, task % vocab]


async def _extend(ask: Ask, ids: list[int], task: int, new: int, vocab: int) -> None:
    for i in range(new):
        await ask(ids)
        # genlm passes a new list, too.
        ids = [*ids, (task + 11 * i) % vocab]


async def measure(ask: Ask, vocab: int, options: Mapping[str, Any], note: Note) -> dict[str, Any]:
    """Measure queries per second, and for how long the caller's event loop was blocked.

    Returns:
        The figures by kind of prefix and number of tasks.
    """
    repetition = 0
    found: dict[str, Any] = {}
    for kind in options["prefixes"]:
        found[kind] = {}
        for tasks in options["tasks"]:
            note(f"{kind} prefixes, {tasks} tasks")

            rates: list[float] = []
            watch = _Watch()
            spent = 0.0
            for measured in range(1000):
                repetition += 1
                if measured == 1:
                    # Collect before the loop is watched: with torch loaded this takes a second.
                    gc.collect()
                    watch.begin()
                prompts = []
                for task in range(tasks):
                    prompts.append(_prompt(kind, options["prefix"], repetition, task, vocab))
                    if task % _TURN == _TURN - 1:
                        await asyncio.sleep(0)
                begun = time.perf_counter()
                running = []
                for task, prompt in enumerate(prompts):
                    extend = _extend(ask, prompt, task, options["new"], vocab)
                    running.append(asyncio.ensure_future(extend))
                    if task % _TURN == _TURN - 1:
                        await asyncio.sleep(0)
                await asyncio.gather(*running)
                took = time.perf_counter() - begun
                if measured:
                    rates.append(tasks * options["new"] / took)
                    spent += took
                if spent > options["seconds"] and len(rates) >= 2:
                    break
            found[kind][tasks] = {
                "queries_per_s": statistics.median(rates),
                "all_queries_per_s": rates,
                "blocked_ms": watch.end() * 1e3,
            }
    return found


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
    arguments: dict[str, Any] = {"device": device}
    if device == "cuda":
        known = engine_fields()
        arguments |= {name: value for name, value in GPU_ARGUMENTS.items() if name in known}
    return arguments


def _sglrl(options: Mapping[str, Any], note: Note) -> dict[str, Any]:
    from sglrl.integrations.genlm import AsyncSGLTransformer

    note("starting")
    with AsyncSGLTransformer.from_name(
        options["model"], engine_opts=_engine_arguments(options["device"])
    ) as model:
        return asyncio.run(
            measure(model.next_token_logprobs, model.client.info.vocab_size, options, note)
        )


def _without_vocabulary() -> None:
    import genlm.backend.llm.base as base

    # The original function fetches GPT-2's tokenizer from the hub.
    base.decode_vocab = lambda tokenizer: ([], [])


def _genlm_sgl(options: Mapping[str, Any], note: Note) -> dict[str, Any]:
    note("starting")
    from genlm.backend.llm.sgl import AsyncSGLTransformer

    _without_vocabulary()
    arguments = _engine_arguments(options["device"]) | {"log_level": "warning"}
    if options["device"] == "cpu":
        from . import sglang_cpu

        sglang_cpu.prepare()
        arguments |= sglang_cpu.arguments("cpu")
    model = AsyncSGLTransformer.from_name(options["model"], engine_opts=arguments)
    vocab = model.model.model_config.vocab_size
    return asyncio.run(measure(model.next_token_logprobs, vocab, options, note))


def _genlm_hf(options: Mapping[str, Any], note: Note) -> dict[str, Any]:
    note("starting")
    from genlm.backend.llm.hf import AsyncTransformer
    from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

    _without_vocabulary()
    if not hasattr(DynamicCache, "from_legacy_cache"):
        # The method is part of transformers 4. Here it is only called without a cache.
        DynamicCache.from_legacy_cache = staticmethod(lambda past: None if past is None else past)
    mod = AutoModelForCausalLM.from_pretrained(options["model"], dtype="auto")
    mod = mod.to(options["device"])
    model = AsyncTransformer(mod, AutoTokenizer.from_pretrained(options["model"]))
    vocab = mod.config.vocab_size
    return asyncio.run(measure(model.next_token_logprobs, vocab, options, note))


if __name__ == "__main__":
    serve_part({"sglrl": _sglrl, "genlm_sgl": _genlm_sgl, "genlm_hf": _genlm_hf})
    sys.stderr.flush()
    # SGLang's threads and CUDA teardown can take seconds and have nothing to save.
    os._exit(0)
