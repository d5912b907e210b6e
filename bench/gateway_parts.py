"""The gateway and SGLang's HTTP server under load, each in its own process. See ``parts``."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import psutil
import uvloop

import sglrl
from sglrl.sessions.session import Session

from .cases import Case
from .parts import ROOT, Note, serve_part
from .sglang_http import serve as serve_sglang
from .tool_parts import TOKENS_OF_QWEN3

_LIMIT_SECONDS = 600


async def _run_load(**options: Any) -> dict[str, Any]:
    """Run ``bench.gateway_load``, and return its figures."""
    given = json.dumps({**options, "limit": _LIMIT_SECONDS})
    command = [sys.executable, "-m", "bench.gateway_load", given]
    process = await asyncio.create_subprocess_exec(
        *command, cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(_LIMIT_SECONDS):
        output, _ = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"the load ended with status {process.returncode}")
    found: dict[str, Any] = json.loads(output)
    return found


_BACKENDS = {"chat": "sglang-oai-chat", "generate": "sglang"}
"""How SGLang's benchmark calls the APIs."""


async def _run_bench_serving(
    url: str, api: str, model: str, in_flight: int, requests: int, words: int, new: int
) -> dict[str, Any]:
    """Run SGLang's ``bench_serving`` with random prompts, and return the figures of a load.

    Args:
        model: the folder with the tokenizer.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "found.jsonl")
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
        process = await asyncio.create_subprocess_exec(
            *[sys.executable, "-m", "sglang.bench_serving", "--disable-tqdm", *given],
            cwd=ROOT,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            async with asyncio.timeout(_LIMIT_SECONDS):
                output, _ = await process.communicate()
        except TimeoutError:
            process.kill()
            raise
        if process.returncode:
            raise RuntimeError(f"bench_serving failed: {output.decode()[-4000:]}")
        found = json.loads(await asyncio.to_thread(file.read_text))
    if found["completed"] != requests:
        raise RuntimeError(f"bench_serving completed {found['completed']} of {requests}")
    return {
        "seconds": found["duration"],
        "tokens": found["total_output_tokens"],
        "first_p50": found["median_ttft_ms"] / 1e3,
        "first_p99": found["p99_ttft_ms"] / 1e3,
        "whole_p50": found["median_e2e_latency_ms"] / 1e3,
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
        """Return the CPU seconds of the conversations."""
        left = list(range(options["requests"]))

        async def work() -> None:
            while left:
                left.pop()
                await self._conversation(options)

        began = time.process_time()
        await asyncio.gather(*[work() for _ in range(options["in_flight"])])
        return time.process_time() - began

    async def _conversation(self, options: Mapping[str, Any]) -> None:
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


def _cost(options: Mapping[str, Any], note: Note) -> dict[str, Any]:
    return uvloop.run(_cost_main(options, note))


async def _cost_main(options: Mapping[str, Any], note: Note) -> dict[str, Any]:
    from sglrl.api.tiny_model import make_tokenizer

    turns = options["requests"] * options["turns"]
    load = {**options, "model": "tiny"}
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = make_tokenizer(Path(folder), 512)
        tokenizer.add_tokens(TOKENS_OF_QWEN3.split())
        tokenizer.save_pretrained(folder)
        note("starting")
        async with (
            sglrl.launch(folder, engine="fake", vocab_size=len(tokenizer)) as client,
            sglrl.serve(client, name="tiny") as gateway,
            sglrl.spawn(Direct, client.address) as direct,
        ):
            (worker,) = gateway._processes.workers
            process = psutil.Process(worker.pid)

            def seconds() -> float:
                times = process.cpu_times()
                return float(times.user + times.system)

            async def run(requests: int) -> dict[str, Any]:
                """Run conversations in sessions that are opened before and ended after."""
                async with AsyncExitStack() as stack:
                    sessions = [
                        await stack.enter_async_context(gateway.session()) for _ in range(requests)
                    ]
                    urls = [session.base_url for session in sessions]
                    before = seconds()
                    found = await _run_load(**{**load, "requests": requests, "sessions": urls})
                    return {**found, "cpu": seconds() - before}

            await run(20)
            await direct.run({**load, "requests": 20})
            rows = []
            for repetition in range(options["repeats"]):
                note(f"repetition {repetition + 1} of {options['repeats']}")
                found = await run(options["requests"])
                rows.append(
                    {
                        "gateway_us": found["cpu"] / turns * 1e6,
                        "direct_us": await direct.run(load) / turns * 1e6,
                        "turns_per_s": turns / found["seconds"],
                    }
                )
    return {"rows": rows}


# --- beside SGLang's server -----------------------------------------------------------------------


def _sglrl(options: Mapping[str, Any], note: Note) -> dict[str, Any]:
    return uvloop.run(_sglrl_main(options, note))


async def _sglrl_main(options: Mapping[str, Any], note: Note) -> dict[str, Any]:
    case = Case(*options["case"])
    note("starting")
    async with (
        sglrl.launch(
            options["model"], device=case.device, dtype=case.dtype, **options["arguments"]
        ) as client,
        sglrl.serve(client, name="bench", processes=options["processes"]) as gateway,
    ):
        return await _loads(gateway.url, case, options, note)


def _sglang(options: Mapping[str, Any], note: Note) -> dict[str, Any]:
    from . import sglang_cpu

    case = Case(*options["case"])
    note("starting")
    arguments = {
        "model_path": options["model"],
        "served_model_name": "bench",
        "device": case.device,
        "dtype": case.dtype,
        "log_level": "warning",
        **sglang_cpu.arguments(case.device),
        **options["arguments"],
    }
    with serve_sglang(arguments) as port:
        return uvloop.run(_loads(f"http://127.0.0.1:{port}", case, options, note))


async def _loads(
    url: str, case: Case, options: Mapping[str, Any], note: Note
) -> dict[str, dict[str, Any]]:
    """Return the figures by API and number of requests in flight."""
    rows: dict[str, dict[str, Any]] = {}
    for api in options["apis"]:
        rows[api] = {}
        for in_flight in options["in_flight"]:
            note(f"{api}, {in_flight} in flight")
            load = {"url": url, "api": api, "in_flight": in_flight}
            load |= {"words": case.prompt, "new": case.new}
            if options["bench_serving"]:
                run, load["model"] = _run_bench_serving, options["model"]
            else:
                run, load["model"] = _run_load, "bench"
            await _run_load(**load | {"model": "bench"}, requests=in_flight)
            requests = max(32, min(4 * in_flight, case.requests))
            found = await run(**load, requests=requests)
            rows[api][str(in_flight)] = found
            speed, first = found["tokens"] / found["seconds"], found["first_p50"] * 1e3
            note(f"  {speed:,.0f} tokens/s, first token after {first:,.1f} ms")
    return rows


if __name__ == "__main__":
    serve_part({"cost": _cost, "sglrl": _sglrl, "sglang": _sglang})
