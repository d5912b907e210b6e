"""The four systems that ``bench.engine`` measures, each in its own process (see ``parts``).

All systems get the same prompts, generate the same number of tokens with logprobs, and keep the
same number of requests in flight. The time of a repetition runs from its first request to its last
answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import psutil

from . import sglang_http
from .cases import Case, prompts
from .load import percentile
from .parts import Note, serve_part

Generate = Callable[[list[int]], Awaitable[int]]
"""Send one prompt, await all samples, and return the number of tokens that have a logprob."""

Flush = Callable[[], Awaitable[Any]]
"""Empty the prefix cache, so that no repetition pays for evicting older prompts."""

_TEMPERATURE = 1.0


class _Repetitions:
    """Collects the repetitions of one system."""

    def __init__(self, case: Case, repeats: int, begun: float, note: Note) -> None:
        self.case = case
        self.repeats = repeats
        self.note = note
        self.start_seconds = time.perf_counter() - begun
        self.rates: list[float] = []
        self.cpu_us: list[float] = []
        self._cpu_before = 0.0
        self.latencies: list[list[float]] = []
        note("warming up")

    def plan(self) -> list[tuple[int, int]]:
        """Return (repetition, requests). The first is the warm-up: one full batch of this shape."""
        case = self.case
        return [(-1, self._warm), *((i, case.requests) for i in range(self.repeats))]

    @property
    def _warm(self) -> int:
        return min(self.case.in_flight, self.case.requests)

    def mark(self) -> None:
        """Store the CPU time. Call this right before the clock of a repetition starts."""
        self._cpu_before = _cpu_seconds()

    def add(self, repetition: int, tokens: int, seconds: float, latencies: list[float]) -> None:
        """Record a repetition. The warm-up is checked, but not recorded.

        Raises:
            ValueError: the answers do not have the requested number of tokens.
        """
        # Latencies are per call. The bare loop has no calls, so its latencies are per request.
        expected = self.case.new * (self.case.requests if repetition >= 0 else self._warm)
        if tokens != expected:
            raise ValueError(f"{tokens} tokens with logprobs came back, {expected} were asked for")
        if repetition < 0:
            return
        self.cpu_us.append((_cpu_seconds() - self._cpu_before) / tokens * 1e6)
        self.rates.append(tokens / seconds)
        self.latencies.append(latencies)
        self.note(f"repetition {repetition + 1} of {self.repeats}: {self.rates[-1]:,.0f} tokens/s")

    def result(self) -> dict[str, Any]:
        return {
            "tokens_per_s": statistics.median(self.rates),
            "all_tokens_per_s": self.rates,
            "p50_s": statistics.median(percentile(seen, 50) for seen in self.latencies),
            "p99_s": statistics.median(percentile(seen, 99) for seen in self.latencies),
            "cpu_us_per_token": statistics.median(self.cpu_us),
            "start_s": self.start_seconds,
        }


def _cpu_seconds() -> float:
    """Return user and system seconds of this process and its children: client, server, engine."""
    me = psutil.Process()
    total = 0.0
    for process in (me, *me.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


async def _measure(
    generate: Generate, flush: Flush, case: Case, repeats: int, begun: float, note: Note
) -> dict[str, Any]:
    """Measure a system under the load of an asyncio client.

    ``in_flight`` samples run at the same time. Each task sends its next prompt when its last one is
    answered.
    """
    repetitions = _Repetitions(case, repeats, begun, note)
    clock = time.perf_counter
    for repetition, count in repetitions.plan():
        waiting = iter(prompts(case, repetition, count // case.samples))
        latencies: list[float] = []
        tokens = 0

        async def caller(waiting: Any = waiting, latencies: list[float] = latencies) -> None:
            nonlocal tokens
            for ids in waiting:
                sent = clock()
                got = await generate(ids)
                tokens += got
                latencies.append(clock() - sent)

        await flush()
        repetitions.mark()
        first = clock()
        async with asyncio.TaskGroup() as group:
            for _ in range(case.in_flight // case.samples):
                group.create_task(caller())
        repetitions.add(repetition, tokens, clock() - first, latencies)
    return repetitions.result()


# --- our client -------------------------------------------------------------------------------


def _sglrl(options: Mapping[str, Any], note: Note) -> dict[str, Any]:
    import uvloop

    return uvloop.run(_sglrl_main(options, note))


async def _sglrl_main(options: Mapping[str, Any], note: Note) -> dict[str, Any]:
    import sglrl

    case, begun = Case(*options["case"]), time.perf_counter()
    note("starting")
    async with sglrl.launch(
        options["model"], device=case.device, dtype=case.dtype, **options["arguments"]
    ) as client:

        async def generate(ids: list[int]) -> int:
            found: Any = await client.generate(
                input_ids=ids,
                n=case.samples,
                max_new_tokens=case.new,
                ignore_eos=True,
                temperature=_TEMPERATURE,
                logprobs=True,
            )
            completions = found if isinstance(found, list) else [found]
            return sum(min(len(one.output_ids), len(one.logprobs)) for one in completions)

        return await _measure(generate, client.flush_cache, case, options["repeats"], begun, note)


# --- the bare scheduler -----------------------------------------------------------------------


def _bare(options: Mapping[str, Any], note: Note) -> dict[str, Any]:
    """Run SGLang's scheduler loop alone. Requests arrive in memory, and outputs are only counted.

    This is the upper limit for every way to call an engine. The requests are made before the clock
    starts.
    """
    case, begun = Case(*options["case"]), time.perf_counter()
    note("starting")
    from sglang.srt.server_args import PortArgs, ServerArgs

    from sglrl_workers.engine.sglang import compat

    from . import sglang_cpu
    from .bare_scheduler import BareScheduler, Feed

    if case.device == "cpu":
        # Our worker attends in the same way. So only the fabric can cause a difference.
        sglang_cpu.prepare("cpu_attention")
    server_args = ServerArgs(**_server_arguments(options))
    port_args = PortArgs.init_new(server_args)
    compat.publish_arguments(server_args, 0, 0)
    feed = Feed()
    scheduler = BareScheduler(feed, *compat.scheduler_arguments(server_args, port_args, 0, 0))
    repetitions = _Repetitions(case, options["repeats"], begun, note)
    feed.begin(
        repetitions.plan(),
        lambda repetition, count: [
            ids
            for ids in prompts(case, repetition, count // case.samples)
            for _ in range(case.samples)
        ],
        case.in_flight,
        case.new,
        _TEMPERATURE,
        scheduler.flush_cache,
        repetitions.mark,
        repetitions.add,
    )
    scheduler.run_event_loop()
    if feed.error is not None:
        raise feed.error
    return repetitions.result() | {"loop": "overlap" if scheduler.enable_overlap else "normal"}


def _server_arguments(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``ServerArgs`` for the systems that are SGLang's own."""
    from . import sglang_cpu

    case = Case(*options["case"])
    return {
        "model_path": options["model"],
        "device": case.device,
        "dtype": case.dtype,
        "skip_tokenizer_init": True,
        "log_level": "warning",
        **sglang_cpu.arguments(case.device),
        **options["arguments"],
    }


# --- sglang.Engine ----------------------------------------------------------------------------


def _engine(options: Mapping[str, Any], note: Note) -> dict[str, Any]:
    case, begun = Case(*options["case"]), time.perf_counter()
    note("starting")
    from sglang.srt.entrypoints.engine import Engine

    from . import sglang_cpu

    class CpuEngine(Engine):  # type: ignore[misc]
        run_scheduler_process_func = staticmethod(sglang_cpu.run_scheduler_process)

    engine = (CpuEngine if case.device == "cpu" else Engine)(**_server_arguments(options))
    sampling = _sampling(case)

    async def generate(ids: list[int]) -> int:
        answer = await engine.async_generate(
            input_ids=ids, sampling_params=sampling, return_logprob=True, stream=False
        )
        return _tokens(answer)

    try:
        # Use the engine's own loop. SGLang sets uvloop's policy on import.
        result: dict[str, Any] = engine.loop.run_until_complete(
            _measure(
                generate,
                engine.tokenizer_manager.flush_cache,
                case,
                options["repeats"],
                begun,
                note,
            )
        )
        return result
    finally:
        engine.shutdown()


def _sampling(case: Case) -> dict[str, Any]:
    return {
        "temperature": _TEMPERATURE,
        "max_new_tokens": case.new,
        "ignore_eos": True,
        "n": case.samples,
    }


def _tokens(answer: dict[str, Any] | list[dict[str, Any]]) -> int:
    answers = answer if isinstance(answer, list) else [answer]
    return sum(
        min(len(one["output_ids"]), len(one["meta_info"]["output_token_logprobs"]))
        for one in answers
    )


# --- SGLang's HTTP server ---------------------------------------------------------------------


def _http(options: Mapping[str, Any], note: Note) -> dict[str, Any]:
    import uvloop

    begun = time.perf_counter()
    note("starting")
    with sglang_http.serve(_server_arguments(options)) as port:
        return uvloop.run(_http_main(f"http://127.0.0.1:{port}/generate", options, begun, note))


async def _http_main(
    url: str, options: Mapping[str, Any], begun: float, note: Note
) -> dict[str, Any]:
    import aiohttp
    import msgspec

    case = Case(*options["case"])
    # This JSON codec costs the client least.
    encode, decode = msgspec.json.Encoder().encode, msgspec.json.Decoder().decode
    headers = {"content-type": "application/json"}
    request = {"sampling_params": _sampling(case), "return_logprob": True, "stream": False}
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
    ) as session:

        async def generate(ids: list[int]) -> int:
            body = encode(request | {"input_ids": ids})
            async with session.post(url, data=body, headers=headers) as response:
                raw = await response.read()
                if response.status != 200:
                    raise RuntimeError(f"HTTP {response.status}: {raw[:300]!r}")
            return _tokens(decode(raw))

        async def flush() -> None:
            async with session.post(url.replace("/generate", "/flush_cache")) as response:
                if response.status != 200:
                    raise RuntimeError(f"HTTP {response.status}: {await response.text()}")

        return await _measure(generate, flush, case, options["repeats"], begun, note)


if __name__ == "__main__":
    serve_part({"sglrl": _sglrl, "bare": _bare, "engine": _engine, "http": _http})
    sys.stderr.flush()
    # SGLang's threads and CUDA teardown can take seconds and have nothing to save.
    os._exit(0)
