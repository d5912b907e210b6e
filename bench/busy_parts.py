"""The runs of ``bench.rollout`` that measure how busy engines are, and how early groups finish.

Each run has its own process, see ``parts``. The engines are fake, and their steps take time.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import sglrl

from .fake_pool import fake_pool, generate_calls
from .load import closed_loop, settle_collector
from .parts import Note
from .payload import TOKENS, Prompts
from .rollout_parts import agent_of, generated_tokens, items_of


async def busy(
    note: Note,
    *,
    agents: int,
    other_agents: int,
    turns: int,
    tool: Sequence[float],
    replicas: int,
    places: int,
    slower: int,
    step_seconds: float,
    tokens_per_step: int,
    capacity_seconds: float,
    fixed: Sequence[float],
    batches: Sequence[float],
) -> dict[str, Any]:
    """Run agents in several ways on the same engines. One agent in four is slow.

    The engines run a limited number of requests at once.

    Args:
        note: shows the user what runs.
        agents: number of agents in the way "as it adapts", in which the rollout itself decides how
            many agents run at a time.
        other_agents: number of agents in every other way.
        turns: number of turns of an agent.
        tool: shortest and longest time of a tool, in seconds.
        replicas: number of engines.
        places: number of requests that an engine runs at once.
        slower: how many times as long a slow agent takes.
        step_seconds: duration of a step of an engine.
        tokens_per_step: tokens that a request receives in a step.
        capacity_seconds: duration of each measurement of the engines' capacity.
        fixed: fixed numbers of agents at a time, as multiples of the places of all engines.
        batches: sizes of the batches in the ways that wait for a whole batch, as multiples of the
            places of all engines.
    """
    prompts, agent, all_places = Prompts(), agent_of(turns, tool), places * replicas

    def items() -> Iterator[dict[str, Any]]:
        for item in items_of(itertools.count(), prompts):
            yield item | {"slower": slower if item["number"] % 4 == 3 else 1}

    note("starting workers")
    async with fake_pool(
        replicas=replicas,
        step_seconds=step_seconds,
        tokens_per_step=tokens_per_step,
        max_running_requests=places,
    ) as client:

        async def capacity() -> float:
            """Measure tokens/s of the same engines under full load.

            The load is always twice the number of requests that the engines can run at once.
            """

            async def tokens_after(seconds: float) -> tuple[int, float]:
                await asyncio.sleep(seconds)
                return await generated_tokens(client)

            counts = asyncio.gather(tokens_after(0.6), tokens_after(0.6 + capacity_seconds))
            await closed_loop(generate_calls(client), 2 * all_places, capacity_seconds + 0.8, 1)
            (before, begun), (after, ended) = await counts
            return (after - before) / (ended - begun)

        async def measured(take: Callable[[int], Any], count: int, warm: int) -> dict[str, float]:
            """Measure the next ``count`` agents. ``await take(n)`` returns the next n groups."""
            await take(warm)
            gc.collect()
            gc.freeze()
            before, begun = await generated_tokens(client)
            cpu = time.process_time()
            trajectories = [t for g in await take(count) for t in g.trajectories]
            cpu = time.process_time() - cpu
            seconds = time.perf_counter() - begun
            after, _ = await generated_tokens(client)
            waits = [turn.seconds for t in trajectories for turn in t.turns]
            return {
                "tokens_per_s": (after - before) / seconds,
                "agents_per_s": count / seconds,
                "turn_p50_s": statistics.median(waits),
                "agent_p50_s": statistics.median(t.timing.total for t in trajectories),
                "cpu_us_per_turn": cpu / len(waits) * 1e6,
            }

        def rollout(some: Iterator[Any], concurrency: int | None) -> sglrl.Rollout:
            return sglrl.rollout(
                client, agent, some, concurrency=concurrency, max_new_tokens=TOKENS
            )

        async def refilled(concurrency: int | None, count: int) -> dict[str, float]:
            async with rollout(items(), concurrency) as run:

                async def take(n: int) -> list[sglrl.Group]:
                    return [(await run.take())[0] for _ in range(n)]

                # The first agents that end are quick ones. Wait until slow agents have ended too.
                figures = await measured(take, count, max(count // 4, 3 * run.concurrency))
                return figures | {"concurrency": run.concurrency}

        async def in_batches(size: int, count: int) -> dict[str, float]:
            endless = items()

            async def take(n: int) -> list[sglrl.Group]:
                groups = []
                for _ in range(0, n, size):
                    run = rollout(itertools.islice(endless, size), size)
                    groups += [group async for group in run]
                return groups

            figures = await measured(take, count // size * size or size, size)
            return figures | {"concurrency": size}

        runs = {"as it adapts": refilled(None, agents)}
        for n in fixed:
            at_a_time = round(n * all_places)
            runs[f"always {at_a_time}"] = refilled(at_a_time, other_agents)
        for n in batches:
            size = round(n * all_places)
            runs[f"batches of {size}, each waited for"] = in_batches(size, other_agents)
        note("capacity of the engines")
        capacities = [await capacity()]
        ways: dict[str, dict[str, float]] = {}
        for name, run in runs.items():
            note(name)
            ways[name] = await run
        note("capacity of the engines, again")
        capacities.append(await capacity())
    most = max(capacities)
    for way in ways.values():
        way["busy"] = way["tokens_per_s"] / most
    return {"capacity_tokens_per_s": most, "capacities": capacities, "ways": ways}


async def depth(
    note: Note,
    *,
    items: int,
    group_size: int,
    batch: int,
    turns: int,
    tool: Sequence[float],
    replicas: int,
    engine: Mapping[str, Any],
) -> dict[str, Any]:
    """Measure when the groups of a data set arrive, and how busy the engines are.

    There are three runs: of the first batch alone, of the whole data set, and of the whole data set
    with all samples at once. The third run always has the most requests for the engines. The steady
    tokens/s exclude the first and the last batch.
    """
    prompts, agent = Prompts(), agent_of(turns, tool)
    all_items = [{"number": i, "input_ids": prompts[i][:32]} for i in range(items)]
    note("starting workers")
    async with fake_pool(replicas=replicas, **engine) as client:

        async def measured(some: list[Any], concurrency: int | None) -> dict[str, Any]:
            settle_collector()
            run = sglrl.rollout(
                client,
                agent,
                some,
                group_size=group_size,
                concurrency=concurrency,
                max_new_tokens=TOKENS,
            )
            before, begun = await generated_tokens(client)
            ends, most = [], 0
            marks = []
            async with run:
                async for _ in run:
                    ends.append(time.perf_counter() - begun)
                    most = max(most, run.metrics.samples_running)
                    if len(ends) in (batch, len(some) - batch):
                        marks.append(await generated_tokens(client))
            if len(marks) < 2:
                marks = [(before, begun), await generated_tokens(client)]
            (tokens, since), (later, until) = marks
            return {
                "first_group_s": ends[0],
                "first_batch_s": ends[min(batch, len(ends)) - 1],
                "seconds": ends[-1],
                "max_running": most,
                "tokens_per_s": run.metrics.generated_tokens / ends[-1],
                "steady_tokens_per_s": (later - tokens) / (until - since),
            }

        ways = {}
        for name, some, concurrency in (
            ("a batch alone", all_items[:batch], None),
            ("as it adapts", all_items, None),
            ("all at once", all_items, items * group_size),
        ):
            note(name)
            ways[name] = await measured(some, concurrency)
    adapts = ways["as it adapts"]
    return {
        "ways": ways,
        "busy": adapts["steady_tokens_per_s"] / ways["all at once"]["tokens_per_s"],
        "first_batch": adapts["first_batch_s"] / ways["a batch alone"]["first_batch_s"],
    }
