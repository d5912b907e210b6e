"""The measurement of ``bench.scale``, in its own process (see ``parts``)."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

import sglrl

from .load import closed_loop, rate_summary
from .parts import ROOT, Note, serve_part
from .payload import TOKENS, VOCAB, Prompts

_AT_MOST = 16
"""Nodes that one process simulates."""


async def measure(options: Mapping[str, Any], note: Note) -> dict[str, Any]:
    """Return the cost of a call for this program, with simulated nodes.

    Args:
        options: ``nodes``, ``workers`` of each, ``levels`` (calls in flight), ``seconds`` and
            ``repeats``.
    """
    nodes, prompts = options["nodes"], Prompts()
    note(f"starting {nodes} nodes")
    begun = time.perf_counter()
    async with (
        sglrl.Hosts("tcp://127.0.0.1:*", at_least=nodes) as hosts,
        _simulated(hosts.address, nodes),
        sglrl.launch(
            "fake",
            engine="fake",
            hosts=hosts,
            replicas=nodes * options["workers"],
            window=max(options["levels"]),
            vocab_size=VOCAB,
            progress=False,
        ) as client,
    ):
        found: dict[str, Any] = {"start_seconds": time.perf_counter() - begun}

        async def call(i: int) -> None:
            await client.generate(input_ids=prompts[i], max_new_tokens=TOKENS, logprobs=True)

        for level in options["levels"]:
            note(f"{level} in flight")
            windows = await closed_loop(call, level, options["seconds"], options["repeats"])
            found[str(level)] = rate_summary(windows)
        return found


@contextlib.asynccontextmanager
async def _simulated(address: str, nodes: int) -> AsyncIterator[None]:
    """Run processes that simulate this number of nodes."""
    counts = [min(_AT_MOST, nodes - done) for done in range(0, nodes, _AT_MOST)]
    command = (sys.executable, "-m", "bench.scale_nodes", address)
    processes = [
        await asyncio.create_subprocess_exec(
            *command, str(count), cwd=ROOT, stdin=asyncio.subprocess.PIPE
        )
        for count in counts
    ]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            await process.wait()


def _scale(options: Mapping[str, Any], note: Note) -> dict[str, Any]:
    import uvloop

    return uvloop.run(measure(options, note))


if __name__ == "__main__":
    serve_part({"scale": _scale})
