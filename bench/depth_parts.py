"""The runs of ``bench.rollout`` that measure how early groups finish, each in its own process.

See ``parts``.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import uvloop

from .load import settle_collector
from .parts import Note, serve_part
from .payload import TOKENS, VOCAB, Prompts
from .rollout_parts import Tool


def _depth(options: Mapping[str, Any], note: Note) -> dict[str, Any]:
    """Deliver the groups of a data set one by one, and of its first batch alone.

    Then run all samples of the data set at once. No run has more requests for the engines. The
    steady tokens/s exclude the first and the last batch.
    """
    return uvloop.run(_main(options, note))


async def _main(options: Mapping[str, Any], note: Note) -> dict[str, Any]:
    import sglrl

    turns, size = options["turns"], options["group_size"]
    prompts, tool = Prompts(), Tool(options["tool"])
    items = [{"number": i, "input_ids": prompts[i][:32]} for i in range(options["items"])]
    batch = options["batch"]

    async def agent(session: sglrl.Session, item: Mapping[str, Any]) -> float:
        for turn in range(turns):
            if turn:
                session.observe(await tool(item["number"], turn))
            await session.generate(max_new_tokens=TOKENS)
        return 1.0

    note("starting workers")
    async with sglrl.launch(
        "fake",
        engine="fake",
        vocab_size=VOCAB,
        replicas=options["replicas"],
        **options["engine"],
    ) as client:

        async def generated() -> tuple[int, float]:
            stats = await client.stats()
            return sum(s.engine.generated_tokens for s in stats), time.perf_counter()

        async def measured(some: list[Any], concurrency: int | None) -> dict[str, Any]:
            settle_collector()
            run = sglrl.rollout(client, agent, some, group_size=size, concurrency=concurrency)
            before, begun = await generated()
            ends, most = [], 0
            marks = []
            async with run:
                async for _ in run:
                    ends.append(time.perf_counter() - begun)
                    most = max(most, run.metrics.samples_running)
                    if len(ends) in (batch, len(some) - batch):
                        marks.append(await generated())
            if len(marks) < 2:
                marks = [(before, begun), await generated()]
            (tokens, since), (later, until) = marks
            return {
                "first_group_s": ends[0],
                "first_batch_s": ends[min(batch, len(ends)) - 1],
                "seconds": ends[-1],
                "most_running": most,
                "tokens_per_s": run.metrics.generated_tokens / ends[-1],
                "steady_tokens_per_s": (later - tokens) / (until - since),
            }

        ways = {}
        for name, some, concurrency in (
            ("a batch alone", items[:batch], None),
            ("as it adapts", items, None),
            ("all at once", items, len(items) * size),
        ):
            note(name)
            ways[name] = await measured(some, concurrency)
    adapts = ways["as it adapts"]
    return {
        "ways": ways,
        "busy": adapts["steady_tokens_per_s"] / ways["all at once"]["tokens_per_s"],
        "first_batch": adapts["first_batch_s"] / ways["a batch alone"]["first_batch_s"],
    }


if __name__ == "__main__":
    serve_part({"depth": _depth})
