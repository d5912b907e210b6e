"""A weight channel whose ranks and senders are played by the test."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import msgspec

from sglrl.core.driver_listener import DriverListener
from sglrl.core.weight_update import COMMIT, JOIN, PREPARE, STAGE
from sglrl.weights.channel import WeightChannel
from sglrl.wire.calls import ErrorBody
from sglrl.wire.codec import decode_to_rank, encode
from sglrl.wire.weights import (
    Abort,
    Commit,
    Committed,
    Describe,
    Join,
    ModelDescription,
    Prepare,
    Prepared,
    RankAnswer,
    RankHello,
    RankSettings,
    SentStage,
    Stage,
    TensorSpec,
    ToRank,
    rank_identity,
)

SPECS = [TensorSpec("w", "float32", (4,))]
SETTINGS = RankSettings(device="cpu", uuid="", torch="2", nccl="", environment={}, host="h", port=1)
PHASE_OF = {Join: JOIN, Prepare: PREPARE, Stage: STAGE, Commit: COMMIT, Abort: "abort"}
NO = ErrorBody("WeightUpdateError", "no")


class Sender:
    """A sender. It receives messages, and answers when the pool's ranks do."""

    settings = SETTINGS

    def __init__(self, pool: Pool, name: str) -> None:
        self._pool = pool
        self.name = name

    def ask(self, message: ToRank) -> None:
        self._pool.asked.put_nowait((self.name, message))


class Pool:
    """Workers of one rank each. ``asked``: pairs of (rank or sender, message), in order.

    ``options`` are those of ``WeightChannel``.
    """

    def __init__(self, workers: int, **options: Any) -> None:
        self.asked: asyncio.Queue[tuple[int | str, ToRank]] = asyncio.Queue()
        self.expelled: list[int] = []
        self.starting: set[int] = set()
        self.channel = WeightChannel(
            lambda worker, _: self.expelled.append(worker),
            lambda worker: worker not in self.starting,
            **options,
        )
        self.channel.attach(cast(Any, self), "inproc://none")
        self.identities = {rank_identity(b"w%d" % w, 0): w for w in range(workers)}
        self.come()

    def come(self) -> None:
        """Connect all workers, with the weights that they were started with."""
        for identity, worker in self.identities.items():
            self.channel.add_rank(worker, 0, identity)
            self.on_peer(identity, encode(RankHello(SETTINGS)))

    def add_listener(self, listener: DriverListener) -> None:
        assert listener is self.channel

    def on_peer(self, identity: bytes, frame: bytes) -> bool:
        return self.channel.on_peer(identity, [frame])

    def on_lost(self, worker: int) -> None:
        self.channel.on_lost(worker)

    def send_to_peer(self, identity: bytes, frame: bytes) -> bool:
        self.asked.put_nowait((self.identities[identity], decode_to_rank(frame)))
        return True

    def say(self, who: int | str, answer: RankAnswer, sender: Sender | None = None) -> None:
        if sender is not None:
            self.channel.updates.sender_answered(sender, answer)
        else:
            assert isinstance(who, int)
            self.on_peer(rank_identity(b"w%d" % who, 0), encode(answer))

    async def next(self, who: int | str, kind: type[Any]) -> Any:
        """Return the next message, which must have this receiver and kind."""
        asked, message = await self.asked.get()
        assert (asked, type(message)) == (who, kind)
        return message

    async def goes_well(self, sender: Sender, workers: list[int], *kinds: type[Any]) -> list[Any]:
        """Answer messages of these kinds for all receivers. Return the last one of each kind."""
        last = []
        for kind in kinds:
            asked: list[int | str] = [*workers]
            if kind in (Join, Stage, Abort):
                asked.append(sender.name)
            messages = [await self.next(who, kind) for who in asked]
            for who, message in zip(asked, messages, strict=True):
                self.say(who, answer(message), sender if who == sender.name else None)
            last.append(messages[-1])
        return last

    async def describes_itself(self) -> None:
        message = await self.next(0, Describe)
        self.say(0, RankAnswer(message.id, "describe", None, raw(ModelDescription(SPECS, []))))


def raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(encode(value))


def answer(message: Any, error: ErrorBody | None = None) -> RankAnswer:
    bodies = {
        Prepare: Prepared("full", 1 << 30),
        Stage: SentStage(1.0, 2.0),
        Commit: Committed(0.5),
        Abort: False,
    }
    return RankAnswer(message.id, PHASE_OF[type(message)], error, raw(bodies.get(type(message))))
