"""Run rollouts as plain coroutines. A program that uses sglrl looks like this module.

One rollout is one conversation, written from top to bottom with ``await``. ``asyncio`` runs many
rollouts at a time. sglrl routes each request to a worker that has its prefix cached, and the worker
batches its requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec

from ...client.client import Client
from ...core.seeds import derived_seed
from ...inference.completion import Completion
from .tasks import SYSTEM_PROMPT, Task


class Rollout(msgspec.Struct, frozen=True):
    """One sampled conversation.

    Attributes:
        task: the task whose questions were asked.
        sample: the index of this conversation among the conversations of the task.
        turns: one completion per question of the task. A completion holds the data that a trainer
            needs: token ids, logprobs and policy versions.
    """

    task: Task
    sample: int
    turns: list[Completion]


async def roll_out(
    client: Client, task: Task, sample: int, *, max_new_tokens: int, seed: int
) -> Rollout:
    """Ask the task's questions one after the other.

    Each turn keeps the ``prompt_ids`` that the model received. A trainer must use these ids. If it
    rendered the text of the conversation again, the tokens could differ from the sampled tokens.
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
            # All turns of a conversation run on the worker that has its prefix cached.
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
    """Run ``samples`` rollouts of every task and return them.

    The first failure cancels the other rollouts and is raised.

    Args:
        client: the client that generates.
        tasks: the tasks, in the order in which their rollouts start.
        samples: number of rollouts of each task.
        limit: maximum number of rollouts in total.
        in_flight: maximum number of rollouts at a time.
        max_new_tokens: maximum number of tokens in an answer.
        seed: the seed from which the seeds of all requests are derived.
        on_done: a function that is called with each rollout when it ends.
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
        # The first error is enough: it caused the cancellation of the other rollouts.
        raise failures.exceptions[0] from None
    return [task.result() for task in running]


def _seed(seed: int, task: Task, sample: int, turn: int) -> int:
    """Derive a different seed for every request. Samples then differ, and runs are repeatable."""
    number = int(task.name.rpartition("-")[2])
    return derived_seed(seed, number, sample, turn)
