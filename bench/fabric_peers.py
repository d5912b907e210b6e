"""The peers that ``bench.fabric`` measures, each in its own process (see ``parts``)."""

from __future__ import annotations

import os
from typing import Any

import uvloop

from .load import LoadPlan, latency_and_rates
from .parts import Note
from .payload import LOGPROBS, TOKENS, Prompts


async def http(note: Note, *, load: LoadPlan) -> dict[str, Any]:
    from .http_peer import PARSER, echo_server, http_client

    prompts = Prompts()
    with echo_server() as url:
        async with http_client(url) as ask:
            note("starting")
            first = await ask(prompts[0])
            assert first.output_ids == prompts[0]
            assert first.logprobs == LOGPROBS
            result = await latency_and_rates(lambda i: ask(prompts[i]), load, note)
    return result | {"parser": PARSER}


class _Echo:
    """The actor for Ray and for Monarch. It returns its first argument and ``LOGPROBS``."""

    def generate(
        self, input_ids: list[int], max_new_tokens: int, logprobs: bool
    ) -> tuple[list[int], list[float]]:
        return input_ids, LOGPROBS


def ray(note: Note, *, load: LoadPlan) -> dict[str, Any]:
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
        note("starting an actor")
        echo = ray.remote(_Echo).remote()
        return uvloop.run(measure_actor(echo.generate.remote, load, note))
    finally:
        ray.shutdown()


def monarch(note: Note, *, load: LoadPlan) -> dict[str, Any]:
    from monarch.actor import shutdown_context

    try:
        return uvloop.run(_monarch(load, note))
    finally:
        shutdown_context().get()


async def _monarch(load: LoadPlan, note: Note) -> dict[str, Any]:
    from monarch.actor import Actor, endpoint, this_host

    class Echo(Actor):
        generate = endpoint(_Echo.generate)

    note("starting an actor")
    processes = this_host().spawn_procs({"processes": 1})
    return await measure_actor(processes.spawn("echo", Echo).generate.call_one, load, note)


async def measure_actor(generate: Any, load: LoadPlan, note: Note) -> dict[str, Any]:
    """Measure a remote method that returns its first argument and ``LOGPROBS``."""
    prompts = Prompts()
    assert await generate(prompts[0], TOKENS, True) == (prompts[0], LOGPROBS)
    return await latency_and_rates(lambda i: generate(prompts[i], TOKENS, True), load, note)
