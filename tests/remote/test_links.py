"""Connections that no longer carry data.

They are between a pool and its client on two hosts whose link fails, and between a pool and its
workers.
"""

from __future__ import annotations

import asyncio
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from at_once import at_once
from namespaces import Host, Program, need_namespaces, two_hosts
from processes import strike
from proxy import Proxy

import sglrl
from sglrl.driver import pool as pool_module
from sglrl.transport.zmq import ZmqRouter
from sglrl.weights import Sender

PROGRAM = Path(__file__).with_name("link_program.py")
STREAMS = 20


def begin(one: Host, two: Host, timeout: float, tokens: int) -> tuple[Program, Program]:
    """Start a pool on ``one`` and a client on ``two``, and begin the client's streams."""
    pool = one.run(PROGRAM, "pool", one.address, str(timeout))
    client = two.run(PROGRAM, "client", pool.says()["address"], str(timeout))
    assert client.says() == {"states": ["ready", "ready"]}
    assert client.ask(stream=STREAMS, tokens=tokens) == {"begun": STREAMS}
    assert pool.ask(wait=1) == {"clients": 1, "states": ["ready", "ready"]}
    return pool, client


async def test_a_link_that_fails() -> None:
    """Both sides notice: the streams raise an error, and the pool forgets the client."""
    need_namespaces()
    await at_once(partial(asyncio.to_thread, fails), ["down", "from the pool", "to the pool"])


def fails(how: str) -> None:
    with two_hosts() as (one, two):
        pool, client = begin(one, two, 4.0, 1_000_000)
        if how == "down":
            two.up = False
        else:
            (one if how == "from the pool" else two).loses = True
        ended = client.ask(end=0)
        assert ended["errors"] == ["Closed"] * STREAMS
        assert "nothing arrived" in ended["messages"][0]
        assert ended["states"] == ["retired", "retired"]
        assert pool.ask(wait=0, idle=0) == {"clients": 0, "states": ["ready", "ready"]}
        client.leave()
        pool.leave()


async def test_a_link_that_fails_for_less_than_the_timeout() -> None:
    """Every token arrives exactly once."""
    need_namespaces()
    await at_once(partial(asyncio.to_thread, fails_for_a_short_time), ["down", "loses"])


def fails_for_a_short_time(how: str) -> None:
    with two_hosts() as (one, two):
        pool, client = begin(one, two, 120.0, 500)
        if how == "down":
            two.up = False
        else:
            one.loses = two.loses = True
        # The streams finish at the pool, which takes five seconds.
        assert pool.ask(idle=0) == {"clients": 1, "states": ["ready", "ready"]}
        if how == "down":
            two.up = True
        else:
            one.loses = two.loses = False
        ended = client.ask(end=0)
        assert ended["errors"] == []
        assert ended["tokens"] == [([1 + n, 2, 3] * 500)[:500] for n in range(STREAMS)]
        assert ended["states"] == ["ready", "ready"]
        client.leave()
        assert pool.ask(wait=0, idle=0) == {"clients": 0, "states": ["ready", "ready"]}
        pool.leave()


async def go_on_elsewhere(client: sglrl.Client, *, silence: Any) -> None:
    """Call ``silence`` for one of two workers, and check that the streams of both complete."""
    streams = [client.stream(input_ids=[n, 2], max_new_tokens=400) for n in range(8)]
    readers = [aiter(stream) for stream in streams]
    got = [(await anext(reader)).output_ids.tolist() for reader in readers]
    assert [w.load for w in client.workers] == [4, 4]
    silence()

    async def read(n: int) -> None:
        async for chunk in readers[n]:
            got[n] += chunk.output_ids.tolist()

    await asyncio.gather(*map(read, range(8)))
    assert got == [[n, 2] * 200 for n in range(8)]
    assert sum(stream.completion.resumed for stream in streams) == 4
    await client.wait_until_full()


POOL: dict[str, Any] = {
    "engine": "fake",
    "replicas": 2,
    "tokens_per_step": 1,
    "step_seconds": 0.01,
    "address": "tcp",
    "hang_timeout": None,
    "heartbeat_timeout": 4.0,
}


async def test_a_worker_whose_connection_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Proxy() as proxy:

        def router(*args: Any, **kwargs: Any) -> ZmqRouter:
            """Make a router to which workers connect through the proxy."""
            made = ZmqRouter(*args, **kwargs)
            proxy.target, made.address = made.address, proxy.address
            return made

        monkeypatch.setattr(pool_module, "ZmqRouter", router)
        async with sglrl.launch("fake", **POOL) as client:
            # Each worker has one connection for calls and one for weights.
            identity = client.pool._supervisor.workers[0].identity

            def own() -> list[int]:
                return [n for n, sent in proxy.beginnings.items() if identity in sent]

            async with asyncio.timeout(300):
                while len(own()) < 2:
                    proxy.arrived.clear()
                    await proxy.arrived.wait()

            def silence() -> None:
                for number in own():
                    proxy.silence(number)

            await go_on_elsewhere(client, silence=silence)


async def test_a_worker_that_is_stopped() -> None:
    """The stopped worker cannot notice anything, and no message is on its way to it."""
    async with sglrl.launch("fake", **POOL) as client:
        pid = client.workers[0].pid
        await go_on_elsewhere(client, silence=lambda: strike(pid, signal.SIGSTOP))
        assert client.workers[0].pid != pid


async def test_a_heartbeat_that_cannot_be() -> None:
    with pytest.raises(sglrl.UsageError, match="heartbeat_timeout"):
        sglrl.launch("fake", engine="fake", heartbeat_timeout=0)
    with pytest.raises(sglrl.UsageError, match="heartbeat_timeout"):
        sglrl.connect("tcp://127.0.0.1:5#token", heartbeat_timeout=-1)
    with pytest.raises(sglrl.UsageError, match="heartbeat_timeout"):
        await Sender.connect("tcp://127.0.0.1:5#token", heartbeat_timeout=0)
