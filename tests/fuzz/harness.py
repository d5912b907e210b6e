"""A driver with its weight channel and an engine client, over memory, and simulated workers.

Some workers are honest. One is bad: any message may come from it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec

from sglrl.client.client import Client
from sglrl.config import FabricConfig
from sglrl.control.pool_control import PoolControl
from sglrl.core.driver_listener import DriverListener
from sglrl.core.members import READY
from sglrl.driver.driver import Driver
from sglrl.driver.worker_info import WorkerInfo
from sglrl.remote.server import PoolServer
from sglrl.transport.memory import MemoryDealer, MemoryRouter
from sglrl.weights.channel import WeightChannel
from sglrl.wire.calls import PROTOCOL_VERSION, Cancel, Item, ItemKind, Load, Ready, Results, Submit
from sglrl.wire.codec import decode_to_rank, decode_to_worker, encode
from sglrl.wire.engine import GenerateArgs, ScoreArgs, TokenChunk
from sglrl.wire.weights import (
    Abort,
    Checksums,
    Commit,
    Committed,
    Describe,
    Join,
    ModelDescription,
    Prepare,
    Prepared,
    RankAnswer,
    RankHello,
    SentStage,
    Stage,
    ToRank,
    rank_identity,
)

from .samples import INFO, ROWS, SETTINGS, SPECS, raw

WINDOW = 8


class Worker:
    """A worker that generates its prompt again, and scores with zeros.

    A streamed answer has two chunks. A ``lazy`` worker does nothing until ``work`` is called.
    """

    def __init__(self, dealer: MemoryDealer, *, lazy: bool = False) -> None:
        self.dealer = dealer
        self.lazy = lazy
        self.waiting: list[list[bytes]] = []
        self.something = asyncio.Event()
        dealer.start(self.on_message)
        pid, endpoints = os.getpid(), ["generate"]
        ready = Ready(PROTOCOL_VERSION, pid, WINDOW, endpoints, "cpu", INFO, ROWS.offer)
        dealer.send([encode(ready)])

    def on_message(self, frames: list[bytes]) -> None:
        self.waiting.append(frames)
        self.something.set()
        if not self.lazy:
            self.work()

    def work(self) -> None:
        waiting, self.waiting = self.waiting, []
        for frames in waiting:
            items = []
            match decode_to_worker(frames[0]):
                case Submit(calls=calls):
                    items = [item for call in calls for item in self.answer(call)]
                case Cancel(ids=cancelled):
                    items = [Item(id_, ItemKind.CANCELLED) for id_ in cancelled]
            self.dealer.send([encode(Results(items, Load(0.5)))])

    @property
    def held(self) -> list[int]:
        messages = (decode_to_worker(frames[0]) for frames in self.waiting)
        return [call.id for m in messages if isinstance(m, Submit) for call in m.calls]

    def answer(self, call: Any) -> list[Item]:
        if call.endpoint == "score":
            asked = msgspec.msgpack.decode(call.args, type=ScoreArgs)
            body = TokenChunk(b"", b"\0" * (len(asked.input_ids) - 4 * asked.start))
            return [Item(call.id, ItemKind.DONE, encode(body))]
        if call.endpoint == "next_token_logprobs":
            return [Item(call.id, ItemKind.DONE, encode(TokenChunk(b"", b"", "stop")))]
        args = msgspec.msgpack.decode(call.args, type=GenerateArgs)
        parts = [args.input_ids]
        if args.stream:
            parts = [args.input_ids[:4], args.input_ids[4:]]
        chunks = [
            TokenChunk(part, part if args.logprobs else b"", "length" if part is parts[-1] else "")
            for part in parts
        ]
        *first, last = chunks
        return [
            *(Item(call.id, ItemKind.CHUNK, encode(chunk)) for chunk in first),
            Item(call.id, ItemKind.DONE, encode(last)),
        ]


ANSWERS = {
    Describe: ("describe", ModelDescription(SPECS, [])),
    Join: ("join", None),
    Prepare: ("prepare", Prepared("full", 1 << 30)),
    Stage: ("stage", SentStage(1.0, 2.0)),
    Commit: ("commit", Committed(0.5)),
    Abort: ("abort", False),
    Checksums: ("checksums", []),
}


def answer(message: ToRank) -> RankAnswer | None:
    """Return the successful answer of a rank, or of a sender."""
    phase, body = ANSWERS.get(type(message), ("", None))
    return RankAnswer(message.id, phase, None, raw(body)) if phase else None  # type: ignore[union-attr]


class Rank:
    """A rank, or a sender in another process, for which every operation succeeds."""

    def __init__(self, dealer: MemoryDealer) -> None:
        self.dealer = dealer
        dealer.start(self.on_message)
        dealer.send([encode(RankHello(SETTINGS))])

    def on_message(self, frames: list[bytes]) -> None:
        found = answer(decode_to_rank(frames[0]))
        if found is not None:
            self.dealer.send([encode(found)])


class LocalSource:
    """A source that sends no tensors, and reports success."""

    settings = SETTINGS

    def __init__(self, channel: WeightChannel) -> None:
        self._channel = channel

    def ask(self, message: ToRank) -> None:
        found = answer(message)
        if found is not None:
            asyncio.get_running_loop().call_soon(self._channel.updates.sender_answered, self, found)


class Weights(WeightChannel):
    """A weight channel with which a replacement of the bad worker serves at once."""

    def must_sync(self, worker: int) -> bool:
        return False


class Pool(DriverListener):
    """A pool without processes, with the parts of ``PoolPort`` that the tests use.

    Worker ``bad`` may send anything in addition to its own messages. When the pool expels it,
    another worker replaces it.
    """

    def __init__(self, honest: int) -> None:
        self.router = MemoryRouter()
        self.driver = Driver(self.router, FabricConfig(routing=("requests",)))
        self.weights = Weights(self.expel)
        self.driver.add_listener(self)
        self.engine = INFO
        self.outer_address = "memory"
        self.weights.attach(self.driver, self.outer_address)
        self.source = LocalSource(self.weights)
        self.driver.start()
        self.lives = 0
        for index in range(honest):
            self.add(index)
        self.bad = honest
        self.bad_identity, self.bad_worker = self.add(honest, lazy=True)

    def add(self, index: int, *, lazy: bool = False) -> tuple[bytes, Worker]:
        self.lives += 1
        identity = b"%d-%d" % (index, self.lives)
        self.driver.workers.add(index, identity)
        self.weights.add_rank(index, 0, rank_identity(identity, 0))
        Rank(self.router.connect(rank_identity(identity, 0)))
        return identity, Worker(self.router.connect(identity), lazy=lazy)

    def on_unusable(self, worker: int, reason: str) -> None:
        self.expel(worker, reason)

    def expel(self, index: int, reason: str) -> None:
        assert index == self.bad, f"worker {index} is innocent: {reason}"
        asyncio.get_running_loop().call_soon(self.replace_bad)

    def replace_bad(self) -> None:
        self.driver.workers.lost(self.bad, "it is bad", returns=True)
        self.bad_identity, self.bad_worker = self.add(self.bad, lazy=True)

    @property
    def workers(self) -> list[WorkerInfo]:
        return [
            WorkerInfo(
                id=m.index,
                pid=1,
                state=m.state,
                weight_version=0,
                device="cpu",
                load=m.load,
                window=m.window,
            )
            for m in self.driver.fabric.members.values()
        ]

    async def full(self, timeout: float) -> None:
        """Return at once: every worker but the bad worker serves."""

    async def enter(self) -> None:
        members = self.driver.fabric.members
        while not all(member.state is READY for member in members.values()):
            await self.driver.change()

    async def close(self, *, drain: bool, timeout: float) -> None:
        await self.weights.close()
        self.driver.close()
        self.router.close()

    def client(self) -> Client:
        pool = cast(Any, self)
        control, serve = PoolControl(pool), partial(PoolServer, pool)
        return Client(pool, control, model="none", timeout=None, serve=serve)


@contextlib.contextmanager
def nobody_raises() -> Iterator[None]:
    """Fail the test if a callback of the loop raised an exception."""
    found: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda loop, context: found.append(context))
    yield
    gc.collect()
    loop.set_exception_handler(None)
    assert not found, found[0].get("exception") or found[0]


def memory() -> int:
    """Return the resident memory of this process, in bytes."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
