"""The systems that ``bench.gateway`` measures: the gateway and SGLang's HTTP server under load.

Each system runs in its own process, see ``parts``.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import psutil

import sglrl
from sglrl.sessions.session import Session

from .cases import Case
from .load import cpu_seconds
from .parts import ROOT, Note
from .sglang_server import sglang_server
from .tool_parts import pool_with_tokenizer

_LIMIT_SECONDS = 600
_BACKENDS = {"chat": "sglang-oai-chat", "generate": "sglang"}
"""The names of the APIs in SGLang's benchmark."""


async def _run(*arguments: str) -> bytes:
    """Run a Python program, and return its output.

    Raises:
        RuntimeError: the program fails.
        TimeoutError: the program takes longer than ``_LIMIT_SECONDS``.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(_LIMIT_SECONDS):
            output, _ = await process.communicate()
    except TimeoutError:
        process.kill()
        raise
    if process.returncode:
        raise RuntimeError(f"{arguments[1]} failed: {output.decode()[-4000:]}")
    return output


async def _run_load(**options: Any) -> dict[str, Any]:
    """Run ``bench.gateway_load``, and return its figures."""
    given = json.dumps({**options, "limit": _LIMIT_SECONDS})
    figures: dict[str, Any] = json.loads(await _run("-m", "bench.gateway_load", given))
    return figures


async def _run_bench_serving(
    url: str, api: str, model: str, in_flight: int, requests: int, words: int, new: int
) -> dict[str, Any]:
    """Run SGLang's ``bench_serving`` with random prompts, and return its figures.

    Args:
        url: the URL of the server.
        api: "chat" or "generate".
        model: the folder with the tokenizer.
        in_flight: number of requests that run at the same time.
        requests: number of all requests.
        words: number of prompt tokens of each request.
        new: number of tokens that each request generates.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "figures.jsonl")
        options: dict[str, Any] = {
            "backend": _BACKENDS[api],
            "base-url": url,
            "model": model,
            "served-model-name": "bench",
            "dataset-name": "random-ids",
            "random-input-len": words,
            "random-output-len": new,
            "random-range-ratio": 1,
            "num-prompts": requests,
            "max-concurrency": in_flight,
            "output-file": file,
        }
        given = [text for name, value in options.items() for text in (f"--{name}", str(value))]
        await _run("-m", "sglang.bench_serving", "--disable-tqdm", *given)
        figures = json.loads(await asyncio.to_thread(file.read_text))
    if figures["completed"] != requests:
        raise RuntimeError(f"bench_serving completed {figures['completed']} of {requests}")
    return {
        "seconds": figures["duration"],
        "tokens": figures["total_output_tokens"],
        "first_p50": figures["median_ttft_ms"] / 1e3,
        "first_p99": figures["p99_ttft_ms"] / 1e3,
        "whole_p50": figures["median_e2e_latency_ms"] / 1e3,
    }


# --- CPU time of the gateway ----------------------------------------------------------------------


class Direct(sglrl.Actor):
    """Samples the conversations of ``gateway_load`` without HTTP, as a client of the same pool."""

    def __init__(self, address: str) -> None:
        self._address = address

    async def open(self) -> None:
        self._client = sglrl.connect(self._address)
        await self._client.__aenter__()

    async def close(self) -> None:
        await self._client.__aexit__(None, None, None)

    @sglrl.endpoint
    async def run(self, options: dict[str, Any]) -> float:
        """Run the conversations, and return the CPU seconds that they took."""
        left = list(range(options["requests"]))

        async def work() -> None:
            while left:
                left.pop()
                await self._conversation(options)

        began = time.process_time()
        await asyncio.gather(*[work() for _ in range(options["in_flight"])])
        return time.process_time() - began

    async def _conversation(self, options: dict[str, Any]) -> None:
        ask = {"role": "user", "content": " ".join(["word"] * options["words"])}
        session: Session
        async with self._client.session(messages=[ask], max_new_tokens=options["new"]) as session:
            for turn in range(options["turns"]):
                if turn:
                    session.observe(ask)
                completion = await session.generate()
                # The gateway decodes the text too.
                assert completion.message.content is not None
            session.trajectory()


async def cost(
    note: Note, *, requests: int, turns: int, in_flight: int, words: int, new: int, repeats: int
) -> dict[str, Any]:
    """Compare the CPU time of the gateway's process with the same turns without HTTP."""
    load: dict[str, Any] = {"turns": turns, "in_flight": in_flight, "words": words, "new": new}
    note("starting")
    async with (
        pool_with_tokenizer() as (client, _),
        sglrl.serve(client, name="tiny") as gateway,
        sglrl.spawn(Direct, client.address) as direct,
    ):
        (worker,) = gateway._processes.workers
        process = psutil.Process(worker.pid)

        async def run(count: int) -> dict[str, Any]:
            """Measure conversations. Their sessions are opened before and closed afterwards."""
            async with AsyncExitStack() as stack:
                sessions = [
                    await stack.enter_async_context(gateway.session()) for _ in range(count)
                ]
                urls = [session.base_url for session in sessions]
                before = cpu_seconds(process)
                figures = await _run_load(**load, model="tiny", requests=count, sessions=urls)
                return {**figures, "cpu": cpu_seconds(process) - before}

        await run(20)
        await direct.run({**load, "requests": 20})
        rows = []
        for repetition in range(repeats):
            note(f"repetition {repetition + 1} of {repeats}")
            figures = await run(requests)
            seconds = await direct.run({**load, "requests": requests})
            rows.append(
                {
                    "gateway_us": figures["cpu"] / (requests * turns) * 1e6,
                    "direct_us": seconds / (requests * turns) * 1e6,
                    "turns_per_s": requests * turns / figures["seconds"],
                }
            )
    return {"rows": rows}


# --- beside SGLang's server -----------------------------------------------------------------------


async def gateway(
    note: Note, *, case: Case, folder: str, processes: int, **loads: Any
) -> dict[str, Any]:
    note("starting")
    async with (
        case.launch(folder) as client,
        sglrl.serve(client, name="bench", processes=processes) as gateway,
    ):
        return await _loads(note, gateway.url, case, folder, **loads)


async def sglang(note: Note, *, case: Case, folder: str, **loads: Any) -> dict[str, Any]:
    note("starting")
    with sglang_server(case.server_arguments(folder, served_model_name="bench")) as port:
        return await _loads(note, f"http://127.0.0.1:{port}", case, folder, **loads)


async def _loads(
    note: Note,
    url: str,
    case: Case,
    folder: str,
    *,
    apis: Sequence[str],
    in_flight: Sequence[int],
    bench_serving: bool,
) -> dict[str, dict[str, Any]]:
    """Run each load. Return its figures by the API and the number of requests in flight."""
    rows: dict[str, dict[str, Any]] = {api: {} for api in apis}
    for api in apis:
        for level in in_flight:
            note(f"{api}, {level} in flight")
            load: dict[str, Any] = {"url": url, "api": api, "in_flight": level}
            load |= {"words": case.prompt, "new": case.new}
            await _run_load(**load, model="bench", requests=level)
            load["requests"] = max(32, min(4 * level, case.requests))
            if bench_serving:
                figures = await _run_bench_serving(**load, model=folder)
            else:
                figures = await _run_load(**load, model="bench")
            rows[api][str(level)] = figures
            speed, first = figures["tokens"] / figures["seconds"], figures["first_p50"] * 1e3
            note(f"  {speed:,.0f} tokens/s, first token after {first:,.1f} ms")
    return rows
