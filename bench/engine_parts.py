"""The four systems that ``bench.engine`` measures, each in its own process (see ``parts``).

All systems get the same prompts, generate the same number of tokens with logprobs, and keep the
same number of requests in flight. The time of a repetition runs from its first request to its last
answer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from .cases import Case, prompts
from .parts import Note
from .repetitions import TEMPERATURE, Repetitions
from .sglang_server import sglang_server

Generate = Callable[[list[int]], Awaitable[int]]
"""Sends one prompt, awaits all samples, and returns the number of tokens that have a logprob."""

Flush = Callable[[], Awaitable[Any]]
"""Empties the prefix cache, so that no repetition pays for evicting older prompts."""


async def _measure(
    generate: Generate, flush: Flush, case: Case, begun: float, note: Note
) -> dict[str, Any]:
    """Measure a system under the load of an asyncio client.

    ``in_flight`` samples run at the same time. Each task sends its next prompt when its previous
    prompt is answered.
    """
    repetitions = Repetitions(case, begun, note)
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


async def sglrl(note: Note, *, case: Case, folder: str) -> dict[str, Any]:
    begun = time.perf_counter()
    note("starting")
    async with case.launch(folder) as client:

        async def generate(ids: list[int]) -> int:
            made: Any = await client.generate(
                input_ids=ids,
                n=case.samples,
                max_new_tokens=case.new,
                ignore_eos=True,
                temperature=TEMPERATURE,
                logprobs=True,
            )
            completions = made if isinstance(made, list) else [made]
            return sum(min(len(one.output_ids), len(one.logprobs)) for one in completions)

        return await _measure(generate, client.flush_cache, case, begun, note)


def bare(note: Note, *, case: Case, folder: str) -> dict[str, Any]:
    """Run SGLang's scheduler loop alone. Requests arrive in memory, and outputs are only counted.

    This is the upper limit for every way to call an engine. The requests are made before the clock
    starts.
    """
    begun = time.perf_counter()
    note("starting")
    from sglang.srt.server_args import PortArgs, ServerArgs

    from sglrl_workers.engine.sglang import compat

    from . import sglang_cpu
    from .bare_scheduler import BareScheduler, Feed

    if not case.on_gpu:
        # Our worker computes attention with the same acceleration, so only the fabric can cause a
        # difference.
        sglang_cpu.prepare("cpu_attention")
    server_args = ServerArgs(**case.server_arguments(folder, skip_tokenizer_init=True))
    port_args = PortArgs.init_new(server_args)
    compat.publish_arguments(server_args, 0, 0)
    feed = Feed(case)
    scheduler = BareScheduler(feed, *compat.scheduler_arguments(server_args, port_args, 0, 0))
    repetitions = Repetitions(case, begun, note)
    feed.begin(repetitions, scheduler.flush_cache)
    scheduler.run_event_loop()
    if feed.error is not None:
        raise feed.error
    return repetitions.result() | {"loop": "overlap" if scheduler.enable_overlap else "normal"}


def engine(note: Note, *, case: Case, folder: str) -> dict[str, Any]:
    begun = time.perf_counter()
    note("starting")
    from sglang.srt.entrypoints.engine import Engine

    from . import sglang_cpu

    class CpuEngine(Engine):  # type: ignore[misc]
        run_scheduler_process_func = staticmethod(sglang_cpu.run_scheduler_process)

    made = (Engine if case.on_gpu else CpuEngine)(
        **case.server_arguments(folder, skip_tokenizer_init=True)
    )
    sampling = _sampling(case)

    async def generate(ids: list[int]) -> int:
        answer = await made.async_generate(
            input_ids=ids, sampling_params=sampling, return_logprob=True, stream=False
        )
        return _tokens(answer)

    try:
        # Use the engine's own loop. SGLang sets uvloop's policy on import.
        result: dict[str, Any] = made.loop.run_until_complete(
            _measure(generate, made.tokenizer_manager.flush_cache, case, begun, note)
        )
        return result
    finally:
        made.shutdown()


def _sampling(case: Case) -> dict[str, Any]:
    return {
        "temperature": TEMPERATURE,
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


async def http(note: Note, *, case: Case, folder: str) -> dict[str, Any]:
    import aiohttp
    import msgspec

    begun = time.perf_counter()
    note("starting")
    # The client spends less time with this JSON codec than with any other.
    encode, decode = msgspec.json.Encoder().encode, msgspec.json.Decoder().decode
    headers = {"content-type": "application/json"}
    request = {"sampling_params": _sampling(case), "return_logprob": True, "stream": False}
    arguments = case.server_arguments(folder, skip_tokenizer_init=True)
    with sglang_server(arguments) as port:
        url = f"http://127.0.0.1:{port}"
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
        ) as session:

            async def post(path: str, body: bytes) -> bytes:
                async with session.post(url + path, data=body, headers=headers) as response:
                    raw = await response.read()
                    if response.status != 200:
                        raise RuntimeError(f"HTTP {response.status}: {raw[:300]!r}")
                return raw

            async def generate(ids: list[int]) -> int:
                return _tokens(
                    decode(await post("/generate", encode(request | {"input_ids": ids})))
                )

            async def flush() -> None:
                await post("/flush_cache", b"")

            return await _measure(generate, flush, case, begun, note)
