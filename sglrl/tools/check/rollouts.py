"""Rollouts as plain coroutines: this is how a program uses sglrl.

One rollout is one conversation, written from top to bottom with ``await``. Running many of them at
a time is what ``asyncio`` is for; sglrl batches what they ask for, on whichever worker has their
prefix cached.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec

from ...inference.client import Client
from ...inference.completion import Completion
from .tasks import SYSTEM_PROMPT, Task


class Rollout(msgspec.Struct, frozen=True):
    """One sampled conversation. ``turns`` holds one completion per question of the task; what a
    trainer needs (token ids, logprobs, policy versions) is in them."""

    task: Task
    sample: int
    turns: list[Completion]


async def roll_out(
    client: Client, task: Task, sample: int, *, max_new_tokens: int, seed: int
) -> Rollout:
    """Ask the task's questions one after the other.

    Each turn keeps the ``prompt_ids`` that the model really saw: rendering a conversation again
    may give other tokens than those that were sampled, so nothing is derived from the text later.
    """
    messages = [{"role": "system", "content": SYSTEM_PROMPT}]
    turns = []
    for turn, question in enumerate(task.questions):
        messages.append({"role": "user", "content": question})
        completion = await client.generate(
            messages=messages,
            max_new_tokens=max_new_tokens,
            temperature=1.0,
            logprobs=True,
            # The turns of one conversation go to the worker that has its prefix cached.
            session=f"{task.name}/{sample}",
            seed=_seed(seed, task, sample, turn),
        )
        turns.append(completion)
        messages.append({"role": "assistant", "content": completion.text})
    return Rollout(task, sample, turns)


async def run_rollouts(
    client: Client,
    tasks: Sequence[Task],
    *,
    samples: int,
    limit: int,
    in_flight: int,
    max_new_tokens: int,
    seed: int,
    on_done: Callable[[Rollout], None],
) -> list[Rollout]:
    """``samples`` rollouts of every task, at most ``limit`` in all and ``in_flight`` at a time.

    ``on_done`` hears of each one as it ends. The first failure cancels the rest and is raised.
    """
    room = asyncio.Semaphore(in_flight)

    async def one(task: Task, sample: int) -> Rollout:
        async with room:
            rollout = await roll_out(client, task, sample, max_new_tokens=max_new_tokens, seed=seed)
        on_done(rollout)
        return rollout

    wanted = [(task, sample) for task in tasks for sample in range(samples)][:limit]
    try:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(one(task, sample)) for task, sample in wanted]
    except BaseExceptionGroup as failures:
        # One error says it all; the other rollouts were cancelled because of it.
        raise failures.exceptions[0] from None
    return [task.result() for task in running]


def _seed(seed: int, task: Task, sample: int, turn: int) -> int:
    """A seed of its own for every request, so that samples differ and a run can be repeated."""
    number = int(task.name.rpartition("-")[2])
    return ((seed * 1_000_003 + number) * 1009 + sample) * 101 + turn
