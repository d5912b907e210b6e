"""Put a load on an HTTP server with OpenAI's or SGLang's API, from a separate process.

``python -m bench.gateway_load '{"url": ...}'`` prints its figures as one JSON object. The option
``sessions`` is a list of URLs of open sessions, each for one conversation. Without this option,
each request is independent and streams its answer.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp
import msgspec
import uvloop

from .load import percentile


def _text(draw: random.Random, words: int) -> str:
    """Return random words of the tokenizer that ``bench.gateway`` makes."""
    return " ".join(f"w{number}" for number in draw.choices(range(10, 400), k=words))


async def _events(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    answer.raise_for_status()
    async for line in answer.content:
        if line.startswith(b"data: ") and line != b"data: [DONE]\n":
            yield line[6:]


async def _stream(
    http: aiohttp.ClientSession, options: Mapping[str, Any], draw: random.Random
) -> tuple[float, float, int]:
    """Make a request. Return the seconds to the first token and to the end, and the token count."""
    sampling = {"temperature": 1.0, "ignore_eos": True}
    if options["api"] == "generate":
        ids = draw.choices(range(10, 400), k=options["words"])
        body: dict[str, Any] = {
            "input_ids": ids,
            "sampling_params": {**sampling, "max_new_tokens": options["new"]},
            "stream": True,
        }
        path = "/generate"
    else:
        ask = {"role": "user", "content": _text(draw, options["words"])}
        body = {**sampling, "model": options["model"], "messages": [ask]}
        body |= {"max_tokens": options["new"], "stream": True}
        body |= {"stream_options": {"include_usage": True}}
        path = "/v1/chat/completions"
    began, first, last = time.perf_counter(), 0.0, b""
    async with http.post(options["url"] + path, json=body) as answer:
        async for event in _events(answer):
            # The first event of a chat has the role, and no text.
            if not first and b'"role"' not in event:
                first = time.perf_counter() - began
            last = event
    decoded = msgspec.json.decode(last)
    if options["api"] == "generate":
        tokens = decoded["meta_info"]["completion_tokens"]
    else:
        tokens = decoded["usage"]["completion_tokens"]
    return first, time.perf_counter() - began, tokens


async def _conversation(
    http: aiohttp.ClientSession, options: Mapping[str, Any], draw: random.Random
) -> tuple[float, float, int]:
    """Run the turns of an open session. Return figures as ``_stream`` does, with 0 as the first."""
    began, tokens, url = time.perf_counter(), 0, options["sessions"].pop()
    messages: list[Any] = []
    for _ in range(options["turns"]):
        messages.append({"role": "user", "content": _text(draw, options["words"])})
        body = {"model": options["model"], "messages": messages, "max_tokens": options["new"]}
        async with http.post(f"{url}/chat/completions", json=body) as answer:
            answer.raise_for_status()
            decoded = msgspec.json.decode(await answer.read())
        messages.append(decoded["choices"][0]["message"])
        tokens += decoded["usage"]["completion_tokens"]
    return 0.0, time.perf_counter() - began, tokens


async def _main(options: Mapping[str, Any]) -> dict[str, Any]:
    one = _conversation if options.get("sessions") else _stream
    left = list(range(options["requests"]))
    results: list[tuple[float, float, int]] = []
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=options["limit"])
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:

        async def work() -> None:
            while left:
                results.append(await one(http, options, random.Random(left.pop())))

        began = time.perf_counter()
        await asyncio.gather(*[work() for _ in range(options["in_flight"])])
        seconds = time.perf_counter() - began
    firsts, whole = [row[0] for row in results], [row[1] for row in results]
    return {
        "seconds": seconds,
        "tokens": sum(row[2] for row in results),
        "first_p50": percentile(firsts, 50),
        "first_p99": percentile(firsts, 99),
        "whole_p50": percentile(whole, 50),
    }


if __name__ == "__main__":
    print(json.dumps(uvloop.run(_main(json.loads(sys.argv[1])))))
