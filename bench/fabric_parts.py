"""The parts of sglrl that ``bench.fabric`` measures, each in its own process (see ``parts``)."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import struct
import sys
import tempfile
import time
import tracemalloc
from collections import deque
from typing import Any

import psutil
from prometheus_client import CollectorRegistry, generate_latest

from sglrl.control.prometheus import PoolMetrics

from .fabric_peers import measure_actor
from .fake_pool import SIMULATED_ENGINE, fake_pool, generate_calls
from .load import LoadPlan, closed_loop, cpu_seconds, latency_and_rates, rate_summary
from .parts import ROOT, Note
from .payload import LOGPROBS, TOKENS, Prompts

# --- sglrl ------------------------------------------------------------------------------------


async def sglrl(
    note: Note, *, replicas: int, address: str, load: LoadPlan, idle_seconds: float
) -> dict[str, Any]:
    """Measure the whole client path to fake engines in worker processes."""
    note("starting workers")
    async with fake_pool(replicas=replicas, address=address) as client:
        call = generate_calls(client)
        first = await call(0)
        assert first.output_ids.tolist() == Prompts()[0]
        assert first.logprobs is not None
        assert first.logprobs.tolist() == LOGPROBS
        result = await latency_and_rates(call, load, note)

        async def and_read(i: int) -> None:
            completion = await call(i)
            _ = completion.output_ids, completion.logprobs

        note("512 in flight, arrays read")
        windows = await closed_loop(and_read, 512, load.seconds, load.repeats)
        result["arrays_read"] = rate_summary(windows)
        note("idle workers")
        note("snapshots")
        result["watching"] = await _watching(client, 20 if load.seconds < 1 else 200)
        result["idle_cpu"] = await _idle_cpu([w.pid for w in client.workers], idle_seconds)
    return result


async def _watching(client: Any, count: int) -> float:
    """Return the CPU seconds of the driver for one snapshot and its text for Prometheus."""
    metrics, registry = PoolMetrics(client), CollectorRegistry()
    registry.register(metrics)
    begun = time.process_time()
    for _ in range(count):
        await metrics.take()
        generate_latest(registry)
    return (time.process_time() - begun) / count


async def _idle_cpu(pids: list[int], seconds: float) -> float:
    """Return the largest share of a core that any of these processes uses without calls."""
    processes = [psutil.Process(pid) for pid in pids]
    before, begun = [cpu_seconds(p) for p in processes], time.perf_counter()
    await asyncio.sleep(seconds)
    after, elapsed = [cpu_seconds(p) for p in processes], time.perf_counter() - begun
    return max((b - a) / elapsed for a, b in zip(before, after, strict=True))


async def actor(note: Note, *, load: LoadPlan) -> dict[str, Any]:
    """Measure an actor that echoes, as the actors of the peers do."""
    import sglrl

    class Echo(sglrl.Actor):
        @sglrl.endpoint
        async def generate(
            self, input_ids: list[int], max_new_tokens: int, logprobs: bool
        ) -> tuple[list[int], list[float]]:
            return input_ids, LOGPROBS

    note("starting an actor")
    async with sglrl.spawn(Echo) as echo:
        return await measure_actor(echo.generate, load, note)


async def transport(note: Note, *, load: LoadPlan) -> dict[str, Any]:
    """Echo messages of the payload's size over our sockets, without codec, checks or routing."""
    from sglrl.transport.zmq import ZmqRouter

    from .zmq_echo import END, IDENTITY

    note("starting")
    loop = asyncio.get_running_loop()
    # The only dealer answers in order, so the first future belongs to the next answer.
    waiting: deque[asyncio.Future[None]] = deque([loop.create_future()])
    here = waiting[0]
    payload = bytes(2 * 4 * TOKENS)
    with tempfile.TemporaryDirectory() as folder:
        router = ZmqRouter(f"ipc://{folder}/echo.sock", max_message_bytes=1 << 20)
        router.start(lambda identity, frames: waiting.popleft().set_result(None))
        echo = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "bench.zmq_echo", router.address, cwd=ROOT
        )
        await here

        def call(i: int) -> asyncio.Future[None]:
            answer = loop.create_future()
            waiting.append(answer)
            router.send(IDENTITY, [payload])
            return answer

        result = await latency_and_rates(call, load, note)
        router.send(IDENTITY, [END])
        await echo.wait()
        router.close()
    return result


# --- memory of calls that wait at the driver --------------------------------------------------


async def waiting(note: Note, *, calls: int, bare: bool) -> dict[str, Any]:
    """Measure the memory of calls that wait at the driver for a slow worker, in bytes a call.

    With ``bare``, measure tasks that hold a prompt of the same size and wait for a bare asyncio
    future, in the same kind of process. Every client needs at least this memory.
    """
    prompts = Prompts()
    note("starting a slow worker")
    async with fake_pool(window=1, tokens_per_step=1, step_seconds=0.02, max_queue=calls) as client:

        async def call(i: int) -> None:
            await client.generate(input_ids=prompts[i], max_new_tokens=4096, logprobs=True)

        async def wait(i: int) -> None:
            ids = prompts[i]
            await asyncio.get_running_loop().create_future()
            del ids

        held = wait if bare else call
        # First, allocate all objects that are made only once: caches, the driver's tables.
        await _hold(held, 10, _resident)
        note(f"{calls:,} wait")
        # Measure the growth of the process first. Later, freed memory would hide part of it.
        resident = await _hold(held, calls, _resident)
        allocated = await _hold(held, calls, _allocated)
    return {"calls": calls, "resident_bytes": resident, "allocated_bytes": allocated}


def _resident() -> int:
    return int(psutil.Process().memory_info().rss)


def _allocated() -> int:
    if not tracemalloc.is_tracing():
        tracemalloc.start()
    return tracemalloc.get_traced_memory()[0]


async def _hold(call: Any, count: int, size: Any) -> float:
    """Return the growth of ``size()`` while ``count`` calls wait, divided by their number.

    The calls are cancelled at the end.
    """
    gc.collect()
    tasks: list[asyncio.Task[None] | None] = [None] * count
    before = size()
    for i in range(count):
        tasks[i] = asyncio.get_running_loop().create_task(call(i))
    # In the loop's next turn, each task runs until it waits. One turn later, its message is sent.
    for _ in range(3):
        await asyncio.sleep(0)
    gc.collect()
    grown = size() - before
    for task in tasks:
        assert task is not None
        assert not task.done()
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)  # type: ignore[arg-type]
    if tracemalloc.is_tracing():
        tracemalloc.stop()
    return float(grown / count)


# --- many workers, in memory ------------------------------------------------------------------


_TIMED = 31
"""One of this many messages is timed. The number is a prime, so that the timed messages do not
follow any period of the load."""


class _MemoryPool:
    """A replacement for the pool of processes that ``Client`` expects. Its workers echo calls.

    The workers run in this process.

    Attributes:
        echo_seconds: CPU time of the echoes, which real workers would spend on other cores. Only
            one of ``_TIMED`` messages is timed. With many workers, each message has one call, and
            reading the thread's clock around every message took 4 % of the total time.
    """

    def __init__(self, workers: int, routing: tuple[str, ...]) -> None:
        import msgspec

        from sglrl.config import FabricConfig
        from sglrl.core.driver_listener import DriverListener
        from sglrl.driver.driver import Driver
        from sglrl.transport.memory import MemoryRouter
        from sglrl.weights.channel import WeightChannel
        from sglrl.wire.calls import PROTOCOL_VERSION, Item, ItemKind, Ready, Results, Submit
        from sglrl.wire.codec import decode_to_worker, encode
        from sglrl.wire.engine import GenerateArgs, TokenChunk

        router = MemoryRouter()
        self.weights = WeightChannel(lambda worker, reason: None)
        self.workers: list[Any] = []
        self.outer_address = ""
        self.engine = SIMULATED_ENGINE
        self.echo_seconds = 0.0
        # ``clocked()`` returns True for one message in ``_TIMED``.
        clocked = itertools.cycle([False] * (_TIMED - 1) + [True]).__next__
        self.driver = Driver(router, FabricConfig(routing=routing))
        decode_args = msgspec.msgpack.Decoder(GenerateArgs).decode
        logprobs = struct.pack(f"<{TOKENS}f", *LOGPROBS)
        pid, endpoints = os.getpid(), ["generate"]
        ready = Ready(PROTOCOL_VERSION, pid, 1024, endpoints, "cpu", SIMULATED_ENGINE)

        def connect(index: int) -> None:
            identity = str(index).encode()
            self.driver.workers.add(index, identity)
            dealer = router.connect(identity)

            def echo(frames: list[bytes]) -> None:
                begun = time.thread_time() if clocked() else 0.0
                message = decode_to_worker(frames[0])
                if type(message) is Submit:
                    items = []
                    for call in message.calls:
                        chunk = TokenChunk(decode_args(call.args).input_ids, logprobs, "length")
                        items.append(Item(call.id, ItemKind.DONE, encode(chunk)))
                    dealer.send([encode(Results(items))])
                if begun:
                    self.echo_seconds += (time.thread_time() - begun) * _TIMED

            dealer.start(echo)
            dealer.send([encode(ready)])

        self._all_ready = all_ready = asyncio.Event()

        class Listener(DriverListener):
            def on_ready(self, worker: int, ready: Ready) -> None:
                if worker == workers - 1:
                    all_ready.set()

        self.driver.add_listener(Listener())
        self.driver.start()
        for index in range(workers):
            connect(index)

    async def enter(self) -> None:
        await self._all_ready.wait()

    def expel(self, index: int, reason: str) -> None:
        raise AssertionError(f"worker {index}: {reason}")

    async def close(self, *, drain: bool = False, timeout: float = 600.0) -> None:
        self.driver.close()
        self.driver.transport.close()


async def memory(
    note: Note, *, workers: int, routing: tuple[str, ...], load: LoadPlan
) -> dict[str, Any]:
    """Measure client and driver with ``workers`` echoes in the same process and event loop."""
    from sglrl.client.client import Client
    from sglrl.control.pool_control import PoolControl

    pool: Any = _MemoryPool(workers, routing)
    rates: dict[str, Any] = {}
    async with Client(pool, PoolControl(pool), model="echo", timeout=None) as client:
        call = generate_calls(client)
        for level in load.levels:
            note(f"{level} in flight")
            pool.echo_seconds = 0.0
            begun = time.thread_time()
            windows = await closed_loop(call, level, load.seconds, load.repeats)
            echo_share = pool.echo_seconds / (time.thread_time() - begun)
            summary = rate_summary(windows)
            summary["driver_us"] = summary["loop_us"] * (1 - echo_share)
            rates[str(level)] = summary
    return {"rates": rates}
