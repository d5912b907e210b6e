"""Simulate nodes with workers that answer every call at once.

``python -m bench.scale_nodes ADDRESS COUNT`` connects ``COUNT`` nodes to the program at
``ADDRESS``. Each worker is only a pair of sockets in this process. The process runs until its
standard input ends.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from typing import Any

import numpy as np
import uvloop

from sglrl.core.node_session import CHECK_SECONDS, MESSAGE_BYTES, Session
from sglrl.driver.environment import environment
from sglrl.transport.zmq import ZmqDealer
from sglrl.wire.calls import (
    PROTOCOL_VERSION,
    Heartbeat,
    Item,
    ItemKind,
    Load,
    Ready,
    Results,
    Shutdown,
    Submit,
    heartbeat_identity,
)
from sglrl.wire.codec import decode_of_connection, decode_to_node, decode_to_worker, encode
from sglrl.wire.engine import TokenChunk
from sglrl.wire.nodes import (
    Admit,
    ClosePool,
    FromPool,
    Goodbye,
    NodeHello,
    OpenPool,
    PoolOpened,
    ToPool,
)
from sglrl.wire.processes import Exited, Fork, Forked, Kill, WorkerSpec

from .fake_pool import SIMULATED_ENGINE
from .payload import LOGPROBS, TOKENS

_CORES = 8
_CHUNK = TokenChunk(
    np.arange(3, 3 + TOKENS, dtype="<i4").tobytes(),
    np.array(LOGPROBS, dtype="<f4").tobytes(),
    "length",
)
_LOAD = Load(0.5, 0, 0, 0.01, 0.01, 1)


class _Worker:
    """A simulated worker. It has two sockets, as a real worker has."""

    def __init__(self, spec: WorkerSpec, window: int) -> None:
        options: Any = {
            "max_message_bytes": spec.max_message_bytes,
            "keys": spec.keys,
            "heartbeat_timeout": spec.heartbeat_timeout,
        }
        self.stopped = asyncio.Event()
        self._answer = encode(_CHUNK)
        self._dealer = ZmqDealer(spec.address, spec.identity, **options)
        self._dealer.start(self._on_message)
        ready = Ready(PROTOCOL_VERSION, os.getpid(), window, ["generate"], "cpu", SIMULATED_ENGINE)
        self._dealer.send([encode(ready)])
        self._beats = ZmqDealer(spec.address, heartbeat_identity(spec.identity), **options)
        self._beats.start(lambda frames: None)
        self._beating = asyncio.ensure_future(self._beat(spec.heartbeat_interval))

    async def _beat(self, interval: float | None) -> None:
        progress = 0
        while interval is not None:
            progress += 1
            self._beats.send([encode(Heartbeat(progress))])
            await asyncio.sleep(interval)

    def _on_message(self, frames: list[Any]) -> None:
        match decode_to_worker(frames[0]):
            case Submit(calls=calls):
                items = [Item(call.id, ItemKind.DONE, self._answer) for call in calls]
                self._dealer.send([encode(Results(items, _LOAD))])
            case Shutdown():
                self.stopped.set()

    def close(self) -> None:
        self._beating.cancel()
        self._dealer.close()
        self._beats.close()


class _Node:
    """A simulated node."""

    def __init__(self, address: str, name: str) -> None:
        self._session: Session | None = None
        self._workers: dict[int, _Worker] = {}
        self._dealer = ZmqDealer(
            address, f"node/{secrets.token_hex(8)}".encode(), max_message_bytes=MESSAGE_BYTES
        )
        self._dealer.start(self._on_message)
        hello = NodeHello(
            protocol=PROTOCOL_VERSION,
            name=name,
            environment=environment(),
            gpus=(),
            cores=_CORES,
            orphan_timeout=30.0,
        )
        self._dealer.send([encode(hello)])
        self._tasks = {asyncio.ensure_future(self._acknowledge())}

    async def _acknowledge(self) -> None:
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            if self._session is not None:
                self._session.acknowledge()

    def _on_message(self, frames: list[Any]) -> None:
        message = decode_of_connection(frames[0])
        match message:
            case Admit():
                self._session = Session(message.session, self._dealer.send)
                self._session.connect(message.received)
            case Goodbye():
                self._dealer.send([encode(Goodbye())])
            case _ if self._session is not None and len(frames) > 1:
                if self._session.receive(message):  # type: ignore[arg-type]
                    self._handle(decode_to_node(frames[1]))

    def _handle(self, order: Any) -> None:
        assert self._session is not None
        match order:
            case OpenPool(pool=pool):
                self._session.send(PoolOpened(pool))
            case ToPool(pool=pool, message=Fork(key=key, spec=spec)):
                self._session.send(FromPool(pool, Forked(key, os.getpid())))
                worker = self._workers[key] = _Worker(spec, spec.body.window)
                task = asyncio.ensure_future(self._until_stopped(pool, key, worker))
                self._tasks.add(task)
            case ToPool(pool=pool, message=Kill(key=key)) if key in self._workers:
                self._workers[key].stopped.set()
            case ClosePool():
                for worker in self._workers.values():
                    worker.stopped.set()

    async def _until_stopped(self, pool: int, key: int, worker: _Worker) -> None:
        await worker.stopped.wait()
        self._workers.pop(key).close()
        if self._session is not None:
            self._session.send(FromPool(pool, Exited(key, 0)))


async def _main(address: str, count: int) -> None:
    nodes = [_Node(address, f"{os.getpid()}-{n}") for n in range(count)]
    await asyncio.to_thread(sys.stdin.read)
    del nodes


if __name__ == "__main__":
    uvloop.run(_main(sys.argv[1], int(sys.argv[2])))
