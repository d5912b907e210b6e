"""The systems that ``bench.rollout`` measures with fake engines, each in its own process.

See ``parts``.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import psutil
import uvloop

from .load import closed_loop, settle_collector
from .parts import Note, serve_part
from .payload import TOKENS, VOCAB, Prompts

TOOL_TOKENS = 16
_DELAYS = 1 << 12


class Tool:
    """A simulated tool. It answers with 16 token ids after a time drawn for this agent and turn.

    Args:
        seconds: shortest and longest time.
    """

    def __init__(self, seconds: Sequence[float]) -> None:
        draw = random.Random(0)
        self._delays = [draw.uniform(*seconds) for _ in range(_DELAYS)]
        self._answer = [draw.randrange(VOCAB) for _ in range(TOOL_TOKENS)]

    async def __call__(self, agent: int, turn: int, times: float = 1.0) -> list[int]:
        await asyncio.sleep(times * self._delays[(agent * 31 + turn) % _DELAYS])
        return self._answer


class Cost(NamedTuple):
    """The cost of some turns in this process.

    Attributes:
        loop_us: CPU time of the event loop's thread per turn.
        cpu_us: CPU time of all threads per turn, including ZeroMQ's.
    """

    turns: int
    seconds: float
    loop_us: float
    cpu_us: float

    @property
    def rate(self) -> float:
        return self.turns / self.seconds


async def cost_of(turns: int, work: Coroutine[Any, Any, None]) -> Cost:
    settle_collector()
    begun = time.perf_counter(), time.thread_time(), time.process_time()
    await work
    seconds, loop, cpu = (
        ended - before
        for ended, before in zip(
            (time.perf_counter(), time.thread_time(), time.process_time()), begun, strict=True
        )
    )
    return Cost(turns, seconds, loop / turns * 1e6, cpu / turns * 1e6)


def summary(costs: Sequence[Cost]) -> dict[str, float]:
    """Return medians over the repetitions."""
    rates = [cost.rate for cost in costs]
    return {
        "rate": statistics.median(rates),
        "lowest": min(rates),
        "highest": max(rates),
        "loop_us": statistics.median(cost.loop_us for cost in costs),
        "cpu_us": statistics.median(cost.cpu_us for cost in costs),
    }


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

    def _rss(self) -> int:
        return int(self._process.memory_info().rss)

    async def watch(self) -> None:
        while True:
            self.peak = max(self.peak, self._rss())
            await asyncio.sleep(0.05)


# --- the driver's cost ------------------------------------------------------------------------


def _agents(options: Mapping[str, Any], note: Note) -> dict[str, Any]:
    """Run ``sglrl.rollout`` over engines that answer at once, with all agents at the same time."""
    return uvloop.run(_agents_main(options, note))


async def _agents_main(options: Mapping[str, Any], note: Note) -> dict[str, Any]:
    """Measure the rollout. The start of the agents' processes is not measured.

    The option ``processes`` is the number of processes in which the agents run. Without it, they
    run in this process.
    """
    import sglrl

    count, turns, replicas = options["agents"], options["turns"], options["replicas"]
    processes = options.get("processes")
    prompts, tool = Prompts(), Tool(options["tool"])

    async def agent(session: sglrl.Session, item: Mapping[str, Any]) -> float:
        for turn in range(turns):
            if turn:
                session.observe(await tool(item["number"], turn))
            await session.generate()
        return 1.0

    note("starting workers")
    async with sglrl.launch("fake", engine="fake", replicas=replicas, vocab_size=VOCAB) as client:

        async def all_of(run: sglrl.Rollout, agents: int) -> None:
            done = 0
            async for group in run:
                (trajectory,) = group.trajectories
                assert len(trajectory.turns) == turns
                assert len(trajectory.response_ids) == turns * (TOKENS + TOOL_TOKENS) - TOOL_TOKENS
                done += 1
            assert done == agents

        async def measured(agents: int) -> Cost:
            items = ({"number": i, "input_ids": prompts[i]} for i in range(agents))
            async with sglrl.rollout(
                client,
                agent,
                items,
                concurrency=count,
                max_new_tokens=TOKENS,
                processes=processes,
            ) as run:
                return await cost_of(agents * turns, all_of(run, agents))

        await measured(min(count, 500))
        gc.collect()
        costs = []
        async with _PeakMemory() as memory:
            for repetition in range(options["repeats"]):
                note(f"repetition {repetition + 1} of {options['repeats']}")
                costs.append(await measured(count))
        found = summary(costs) | {"bytes_per_agent": (memory.peak - memory.before) / count}
        if processes is not None:
            found["processes"] = processes
        return found


# --- beside a program that computes -------------------------------------------------------------


def _beside(options: Mapping[str, Any], note: Note) -> dict[str, Any]:
    """Run agents whose rewards take a millisecond of Python each, in the driver and in processes.

    A thread of the driver computes in Python meanwhile, or does not.
    """
    return uvloop.run(_beside_main(options, note))


async def _beside_main(options: Mapping[str, Any], note: Note) -> dict[str, Any]:
    import sglrl

    agents, turns, at_a_time = options["agents"], options["turns"], options["at_a_time"]
    prompts, tool = Prompts(), Tool(options["tool"])

    async def agent(session: sglrl.Session, item: Mapping[str, Any]) -> float:
        for turn in range(turns):
            if turn:
                session.observe(await tool(item["number"], turn))
            await session.generate()
        until = time.thread_time() + 0.001
        while time.thread_time() < until:
            pass
        return 1.0

    computes = False
    steps = 0

    def train() -> None:
        nonlocal steps
        while computes:
            sum(i * i for i in range(1000))
            steps += 1

    found = []
    async with sglrl.launch(
        "fake",
        engine="fake",
        replicas=options["replicas"],
        vocab_size=VOCAB,
        step_seconds=0.002,
        tokens_per_step=16,
    ) as client:
        for processes in (None, *options["ways"]):
            for computes, interval in ((False, 0.005), (True, 0.005), (True, 0.0005)):
                # A thread may keep the interpreter this long. Python's default is 5 ms.
                sys.setswitchinterval(interval)
                beside = f"{interval * 1e3:g} ms beside a computing thread" if computes else "alone"
                note(f"agents in {processes or 'the same'} process(es), {beside}")
                items = ({"number": i, "input_ids": prompts[i]} for i in range(agents + 100))
                async with sglrl.rollout(
                    client,
                    agent,
                    items,
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
                found.append(
                    {
                        "processes": processes,
                        "beside": busy,
                        "switch_interval": interval,
                        "rate": agents * turns / seconds,
                        "steps_per_s": steps / seconds,
                    }
                )
    return {"ways": found}


# --- the same over HTTP -----------------------------------------------------------------------


def _http(options: Mapping[str, Any], note: Note) -> dict[str, Any]:
    """Run the same agents with ``asyncio.gather`` and a semaphore around each request.

    An agent only keeps the lists of its ids and logprobs.
    """
    from .http_peer import PARSER, echo_server

    with echo_server() as url:
        return uvloop.run(_http_main(url, options, note)) | {"parser": PARSER}


async def _http_main(url: str, options: Mapping[str, Any], note: Note) -> dict[str, Any]:
    from .http_peer import http_client

    count, turns = options["agents"], options["turns"]
    prompts, tool = Prompts(), Tool(options["tool"])
    semaphore = asyncio.Semaphore(options["in_flight"])
    async with http_client(url) as ask:

        async def agent(number: int) -> tuple[list[int], list[float]]:
            ids, logprobs = prompts[number], []
            for turn in range(turns):
                if turn:
                    ids += await tool(number, turn)
                    logprobs += [0.0] * TOOL_TOKENS
                async with semaphore:
                    answer = await ask(ids)
                ids += answer.output_ids
                logprobs += answer.logprobs
            return ids, logprobs

        async def run(agents: int) -> None:
            found = await asyncio.gather(*(agent(i) for i in range(agents)))
            assert len(found[0][1]) == turns * TOKENS + (turns - 1) * TOOL_TOKENS

        await run(min(count, 500))
        gc.collect()
        note(f"{count:,} agents")
        async with _PeakMemory() as memory:
            cost = await cost_of(count * turns, run(count))
        return summary([cost]) | {"bytes_per_agent": (memory.peak - memory.before) / count}


# --- engines kept busy ------------------------------------------------------------------------


def _busy(options: Mapping[str, Any], note: Note) -> dict[str, Any]:
    """Run agents in several ways on the same engines. One agent in four is slow.

    The engines take time and run a limited number of requests at once.
    """
    return uvloop.run(_busy_main(options, note))


async def _busy_main(options: Mapping[str, Any], note: Note) -> dict[str, Any]:
    import sglrl

    turns, places = options["turns"], options["places"]
    replicas, slower = options["replicas"], options["slower"]
    prompts, tool = Prompts(), Tool(options["tool"])

    async def agent(session: sglrl.Session, item: Mapping[str, Any]) -> float:
        times = slower if item["number"] % 4 == 3 else 1
        for turn in range(turns):
            if turn:
                session.observe(await tool(item["number"], turn, times))
            await session.generate(max_new_tokens=TOKENS * times)
        return 1.0

    def items() -> Iterator[dict[str, Any]]:
        return ({"number": i, "input_ids": prompts[i]} for i in itertools.count())

    note("starting workers")
    async with sglrl.launch(
        "fake",
        engine="fake",
        replicas=replicas,
        vocab_size=VOCAB,
        step_seconds=options["step_seconds"],
        tokens_per_step=options["tokens_per_step"],
        max_running_requests=places,
    ) as client:

        async def generated() -> int:
            return sum([s.engine.generated_tokens for s in await client.stats()])

        async def call(i: int) -> None:
            await client.generate(input_ids=prompts[i], max_new_tokens=TOKENS, logprobs=True)

        async def capacity() -> float:
            """Measure tokens/s of the same engines under full load.

            The load is always twice the number of requests that the engines can run at once.
            """
            before: list[Any] = []

            async def look(after: float) -> None:
                await asyncio.sleep(after)
                before.append((await generated(), time.perf_counter()))

            seconds = options["capacity_seconds"]
            looks = asyncio.gather(look(0.6), look(0.6 + seconds))
            await closed_loop(call, 2 * places * replicas, seconds + 0.8, 1)
            await looks
            (tokens, begun), (later, ended) = before
            return float((later - tokens) / (ended - begun))

        async def measured(take: Callable[[int], Any], agents: int, warm: int) -> dict[str, float]:
            """Measure the next agents. ``await take(n)`` returns the next n groups that end."""
            await take(warm)
            gc.collect()
            gc.freeze()
            before, begun = await generated(), time.perf_counter()
            cpu = time.process_time()
            trajectories = [t for g in await take(agents) for t in g.trajectories]
            cpu = time.process_time() - cpu
            seconds = time.perf_counter() - begun
            speed = (await generated() - before) / seconds
            waits = [turn.seconds for t in trajectories for turn in t.turns]
            return {
                "tokens_per_s": speed,
                "agents_per_s": agents / seconds,
                "turn_p50_s": statistics.median(waits),
                "agent_p50_s": statistics.median(t.timing.total for t in trajectories),
                "cpu_us_per_turn": cpu / len(waits) * 1e6,
            }

        async def refilled(concurrency: int | None, agents: int) -> dict[str, float]:
            run = sglrl.rollout(client, agent, items(), concurrency=concurrency)
            async with run:

                async def take(n: int) -> list[sglrl.Group]:
                    return [(await run.take())[0] for _ in range(n)]

                # The first agents to end are quick ones. Wait until slow ones have ended too.
                found = await measured(take, agents, max(agents // 4, 3 * run.concurrency))
                return found | {"concurrency": run.concurrency}

        async def in_batches(size: int, agents: int) -> dict[str, float]:
            endless = items()

            async def take(n: int) -> list[sglrl.Group]:
                found = []
                for _ in range(0, n, size):
                    batch = itertools.islice(endless, size)
                    run = sglrl.rollout(client, agent, batch, concurrency=size)
                    found += [group async for group in run]
                return found

            found = await measured(take, agents // size * size or size, size)
            return found | {"concurrency": size}

        note("capacity of the engines")
        most = [await capacity()]
        ways: dict[str, dict[str, float]] = {}
        fewer = options["other_agents"]
        everywhere = places * replicas
        for name, way in (
            ("as it adapts", refilled(None, options["agents"])),
            *(
                (f"always {round(n * everywhere)}", refilled(round(n * everywhere), fewer))
                for n in options["fixed"]
            ),
            *(
                (
                    f"batches of {round(n * everywhere)}, each waited for",
                    in_batches(round(n * everywhere), fewer),
                )
                for n in options["batches"]
            ),
        ):
            note(name)
            ways[name] = await way
        note("capacity of the engines, again")
        most.append(await capacity())
        for found in ways.values():
            found["busy"] = found["tokens_per_s"] / max(most)
        return {"capacity_tokens_per_s": max(most), "capacities": most, "ways": ways}


if __name__ == "__main__":
    serve_part({"agents": _agents, "beside": _beside, "http": _http, "busy": _busy})
