"""The peers that ``bench.fabric`` measures, each in its own process (see ``parts``)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import uvloop

from .load import latency_and_rates
from .parts import Note, serve_part
from .payload import LOGPROBS, TOKENS, Prompts


def _http(options: Mapping[str, Any], note: Note) -> dict[str, Any]:
    from .http_peer import PARSER, echo_server

    with echo_server() as url:
        return uvloop.run(_http_main(url, options, note)) | {"parser": PARSER}


async def _http_main(url: str, options: Mapping[str, Any], note: Note) -> dict[str, Any]:
    from .http_peer import http_client

    prompts = Prompts()
    async with http_client(url) as ask:
        note("starting")
        first = await ask(prompts[0])
        assert first.output_ids == prompts[0]
        assert first.logprobs == LOGPROBS
        return await latency_and_rates(lambda i: ask(prompts[i]), options, note)


def _ray(options: Mapping[str, Any], note: Note) -> dict[str, Any]:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray

    note("starting Ray")
    ray.init(
        num_cpus=1,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
        object_store_memory=200 << 20,
    )
    try:
        return uvloop.run(_ray_main(options, note))
    finally:
        ray.shutdown()


async def _ray_main(options: Mapping[str, Any], note: Note) -> dict[str, Any]:
    import ray

    class Echo:
        def generate(
            self, input_ids: list[int], max_new_tokens: int, logprobs: bool
        ) -> tuple[list[int], list[float]]:
            return input_ids, LOGPROBS

    note("starting an actor")
    return await _actor(ray.remote(Echo).remote().generate.remote, options, note)


def _monarch(options: Mapping[str, Any], note: Note) -> dict[str, Any]:
    from monarch.actor import shutdown_context

    try:
        return uvloop.run(_monarch_main(options, note))
    finally:
        shutdown_context().get()


async def _monarch_main(options: Mapping[str, Any], note: Note) -> dict[str, Any]:
    from monarch.actor import Actor, endpoint, this_host

    class Echo(Actor):
        @endpoint
        def generate(
            self, input_ids: list[int], max_new_tokens: int, logprobs: bool
        ) -> tuple[list[int], list[float]]:
            return input_ids, LOGPROBS

    note("starting an actor")
    processes = this_host().spawn_procs({"processes": 1})
    return await _actor(processes.spawn("echo", Echo).generate.call_one, options, note)


async def _actor(generate: Any, options: Mapping[str, Any], note: Note) -> dict[str, Any]:
    """Measure a remote method that returns its first argument and ``LOGPROBS``."""
    prompts = Prompts()
    assert await generate(prompts[0], TOKENS, True) == (prompts[0], LOGPROBS)
    return await latency_and_rates(lambda i: generate(prompts[i], TOKENS, True), options, note)


if __name__ == "__main__":
    serve_part({"http": _http, "ray": _ray, "monarch": _monarch})
