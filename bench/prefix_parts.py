"""The run of ``bench.rollout`` that measures the prefix cache of a real engine."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import sglrl

from .cases import Case
from .parts import Note


async def prefix(
    note: Note,
    *,
    case: Case,
    turns: int,
    system: int,
    question: int,
    tool: int,
    tool_seconds: float,
) -> dict[str, Any]:
    """Run ``case.in_flight`` agents with one system prompt, all at the same time.

    The result compares the tokens that the engine took from its prefix cache with the tokens that
    it could have taken.

    Args:
        note: shows the user what runs.
        case: the model and the load.
        turns: number of turns of each agent.
        system: number of tokens of the system prompt.
        question: number of tokens of each agent's own prompt.
        tool: number of tokens that a tool returns.
        tool_seconds: time that a tool takes.
    """
    count, new = case.in_flight, case.new
    begun = time.perf_counter()
    note("starting")
    async with case.launch() as client:
        start_seconds = time.perf_counter() - begun
        vocab = client.info.vocab_size

        async def repetition(number: int) -> tuple[list[sglrl.Trajectory], float]:
            draw = random.Random(number)

            def ids(size: int) -> list[int]:
                return [draw.randrange(vocab) for _ in range(size)]

            common = ids(system)
            answers = [[ids(tool) for _ in range(turns - 1)] for _ in range(count)]
            items = [{"number": i, "input_ids": common + ids(question)} for i in range(count)]

            async def agent(session: sglrl.Session, item: Mapping[str, Any]) -> float:
                for turn in range(turns):
                    if turn:
                        await asyncio.sleep(tool_seconds)
                        session.observe(answers[item["number"]][turn - 1])
                    await session.generate()
                return 1.0

            await client.flush_cache()
            begun = time.perf_counter()
            trajectories = [
                trajectory
                async for group in sglrl.rollout(
                    client, agent, items, concurrency=count, max_new_tokens=new, ignore_eos=True
                )
                for trajectory in group.trajectories
            ]
            return trajectories, time.perf_counter() - begun

        note("warming up")
        await repetition(-1)
        speeds, counts = [], []
        for number in range(case.repeats):
            note(f"repetition {number + 1} of {case.repeats}")
            trajectories, seconds = await repetition(number)
            speeds.append(count * turns * new / seconds)
            counts.append(_cached(trajectories, system))
    rows = [[sum(column) for column in zip(*row, strict=True)] for row in zip(*counts, strict=True)]
    prompt, cached, ideal = (sum(column) for column in zip(*rows, strict=True))
    return {
        "start_s": start_seconds,
        "tokens_per_s": statistics.median(speeds),
        "all_tokens_per_s": speeds,
        "by_turn": [dict(zip(("prompt", "cached", "ideal"), row, strict=True)) for row in rows],
        "hit_rate": cached / prompt,
        "ideal_hit_rate": ideal / prompt,
        "of_ideal": cached / ideal,
    }


def _cached(trajectories: Sequence[Any], system: int) -> list[list[int]]:
    """Return three token counts for each turn, over all agents.

    The first count has all tokens of the prompts. The second count has the tokens that came from
    the cache. The third count has the tokens whose KV cache an earlier request had computed. In the
    first turn, these are the system prompts of all agents but the first. In later turns, these are
    all tokens of the previous turn except the last, which was not the input of any step. Agents
    share only the system prompt, because their other tokens are drawn at random.
    """
    rows = []
    for number in range(len(trajectories[0].turns)):
        turns = [t.turns[number] for t in trajectories]
        if number:
            before = [t.turns[number - 1] for t in trajectories]
            ideal = sum(b.prompt_tokens + b.stop - b.start - 1 for b in before)
        else:
            ideal = system * (len(turns) - 1)
        rows.append(
            [sum(t.prompt_tokens for t in turns), sum(t.cached_tokens for t in turns), ideal]
        )
    return rows
