"""The systems that ``bench.rollout`` measures with fake engines.

Each system runs in its own process, see ``parts``.
"""

from __future__ import annotations

import asyncio
import gc
import random
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from typing import Any

import psutil

import sglrl

from .fake_pool import fake_pool
from .load import Clocks, Window, rate_summary, settle_collector
from .parts import Note
from .payload import TOKENS, VOCAB, Prompts

TOOL_TOKENS = 16
_DELAYS = 1 << 12


class Tool:
    """A simulated tool, which answers with 16 token ids after a random time.

    The time depends only on the agent and the turn.

    Args:
        seconds: the shortest and the longest time.
    """

    def __init__(self, seconds: Sequence[float]) -> None:
        draw = random.Random(0)
        self._delays = [draw.uniform(*seconds) for _ in range(_DELAYS)]
        self._answer = [draw.randrange(VOCAB) for _ in range(TOOL_TOKENS)]

    async def __call__(self, agent: int, turn: int, times: float = 1.0) -> list[int]:
        await asyncio.sleep(times * self._delays[(agent * 31 + turn) % _DELAYS])
        return self._answer


def agent_of(
    turns: int, tool: Sequence[float], after: Callable[[], None] = lambda: None
) -> Callable[..., Coroutine[Any, Any, float]]:
    """Return an agent that calls a tool between two turns, and calls ``after`` at its end.

    The field ``slower`` of an item is the factor by which its tools and answers are longer.
    """
    simulated = Tool(tool)

    async def agent(session: sglrl.Session, item: Mapping[str, Any]) -> float:
        times = item.get("slower", 1)
        longer = {} if times == 1 else {"max_new_tokens": TOKENS * times}
        for turn in range(turns):
            if turn:
                session.observe(await simulated(item["number"], turn, times))
            await session.generate(**longer)
        after()
        return 1.0

    return agent


def items_of(numbers: Iterable[int], prompts: Prompts) -> Iterator[dict[str, Any]]:
    return ({"number": i, "input_ids": prompts[i]} for i in numbers)


async def generated_tokens(client: sglrl.Client) -> tuple[int, float]:
    """Return the number of tokens that the engines have generated so far, and the present time."""
    stats = await client.stats()
    return sum(s.engine.generated_tokens for s in stats), time.perf_counter()


async def cost_of(turns: int, work: Coroutine[Any, Any, None]) -> Window:
    """Run ``work``, which consists of ``turns`` turns, and return its cost in this process."""
    settle_collector()
    clocks = Clocks()
    await work
    return clocks.window(turns)


class _PeakMemory:
    """The peak RSS of this process in bytes, read every 50 ms."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self.before = self.peak = self._rss()

    async def __aenter__(self) -> _PeakMemory:
        self._watch = asyncio.create_task(self.watch())
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._watch.cancel()

    @property
    def grown(self) -> int:
        return self.peak - self.before

    def _rss(self) -> int:
        return int(self._process.memory_info().rss)

    async def watch(self) -> None:
        while True:
            self.peak = max(self.peak, self._rss())
            await asyncio.sleep(0.05)


# --- the driver's cost ------------------------------------------------------------------------


async def agents(
    note: Note,
    *,
    agents: int,
    turns: int,
    tool: Sequence[float],
    replicas: int,
    repeats: int,
    processes: int | None = None,
) -> dict[str, Any]:
    """Run ``sglrl.rollout`` over engines that answer at once, with all agents at the same time.

    The agents run in this process, or in ``processes`` other processes. The start of the processes
    is not measured.
    """
    prompts = Prompts()
    note("starting workers")
    async with fake_pool(replicas=replicas) as client:

        async def all_of(run: sglrl.Rollout, count: int) -> None:
            done = 0
            async for group in run:
                (trajectory,) = group.trajectories
                assert len(trajectory.turns) == turns
                assert len(trajectory.response_ids) == turns * (TOKENS + TOOL_TOKENS) - TOOL_TOKENS
                done += 1
            assert done == count

        async def measured(count: int) -> Window:
            async with sglrl.rollout(
                client,
                agent_of(turns, tool),
                items_of(range(count), prompts),
                concurrency=agents,
                max_new_tokens=TOKENS,
                processes=processes,
            ) as run:
                return await cost_of(count * turns, all_of(run, count))

        await measured(min(agents, 500))
        gc.collect()
        costs = []
        async with _PeakMemory() as memory:
            for repetition in range(repeats):
                note(f"repetition {repetition + 1} of {repeats}")
                costs.append(await measured(agents))
    result = rate_summary(costs) | {"bytes_per_agent": memory.grown / agents}
    return result if processes is None else result | {"processes": processes}


# --- beside a program that computes -------------------------------------------------------------


def _compute_for_a_millisecond() -> None:
    until = time.thread_time() + 0.001
    while time.thread_time() < until:
        pass


async def beside(
    note: Note,
    *,
    agents: int,
    turns: int,
    tool: Sequence[float],
    at_a_time: int,
    replicas: int,
    ways: Sequence[int],
) -> dict[str, Any]:
    """Run agents whose rewards take a millisecond of Python each, in the driver and in processes.

    ``ways`` has the numbers of processes. The driver and each of these numbers are measured without
    and with a thread of the driver that always computes in Python.
    """
    prompts = Prompts()
    computes = False
    steps = 0

    def train() -> None:
        nonlocal steps
        while computes:
            sum(i * i for i in range(1000))
            steps += 1

    result = []
    async with fake_pool(replicas=replicas, step_seconds=0.002, tokens_per_step=16) as client:
        for processes in (None, *ways):
            for computes, interval in ((False, 0.005), (True, 0.005), (True, 0.0005)):
                # The interval is the time for which a thread may keep the interpreter. Python's
                # default is 5 ms.
                sys.setswitchinterval(interval)
                beside = f"{interval * 1e3:g} ms beside a computing thread" if computes else "alone"
                note(f"agents in {processes or 'the same'} process(es), {beside}")
                async with sglrl.rollout(
                    client,
                    agent_of(turns, tool, _compute_for_a_millisecond),
                    items_of(range(agents + 100), prompts),
                    concurrency=at_a_time,
                    max_new_tokens=TOKENS,
                    processes=processes,
                ) as run:
                    await run.take(100)
                    thread = threading.Thread(target=train)
                    steps = 0
                    begun = time.perf_counter()
                    thread.start()
                    try:
                        await run.take(agents)
                    finally:
                        seconds = time.perf_counter() - begun
                        busy, computes = computes, False
                        thread.join()
                result.append(
                    {
                        "processes": processes,
                        "beside": busy,
                        "switch_interval": interval,
                        "rate": agents * turns / seconds,
                        "steps_per_s": steps / seconds,
                    }
                )
    return {"ways": result}


# --- the same over HTTP -----------------------------------------------------------------------


async def http(
    note: Note, *, agents: int, turns: int, tool: Sequence[float], in_flight: int
) -> dict[str, Any]:
    """Run the same agents over HTTP, with ``asyncio.gather`` and a semaphore around each request.

    An agent keeps only the lists of its ids and logprobs.
    """
    from .http_peer import PARSER, echo_server, http_client

    prompts, simulated = Prompts(), Tool(tool)
    semaphore = asyncio.Semaphore(in_flight)
    with echo_server() as url:
        async with http_client(url) as ask:

            async def agent(number: int) -> tuple[list[int], list[float]]:
                ids, logprobs = prompts[number], []
                for turn in range(turns):
                    if turn:
                        ids += await simulated(number, turn)
                        logprobs += [0.0] * TOOL_TOKENS
                    async with semaphore:
                        answer = await ask(ids)
                    ids += answer.output_ids
                    logprobs += answer.logprobs
                return ids, logprobs

            async def run(count: int) -> None:
                result = await asyncio.gather(*(agent(i) for i in range(count)))
                assert len(result[0][1]) == turns * TOKENS + (turns - 1) * TOOL_TOKENS

            await run(min(agents, 500))
            gc.collect()
            note(f"{agents:,} agents")
            async with _PeakMemory() as memory:
                cost = await cost_of(agents * turns, run(agents))
    return rate_summary([cost]) | {"bytes_per_agent": memory.grown / agents, "parser": PARSER}
