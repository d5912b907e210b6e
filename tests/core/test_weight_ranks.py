"""Workers of two ranks get the current weights from another worker or from their host's memory.

A copy holds the engine. Rank 0 broadcasts the id of its hold, so both ranks must use one id.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from sglrl.errors import WeightUpdateError
from sglrl.weights.update_request import UpdateRequest
from sglrl.wire.calls import ErrorBody
from sglrl.wire.codec import encode
from sglrl.wire.weights import (
    CancelCopy,
    Commit,
    Describe,
    Join,
    KeepWeights,
    ModelDescription,
    PeerCopyOffer,
    Prepare,
    RankAnswer,
    RankHello,
    ReceivePeerCopy,
    RestoreWeights,
    SendPeerCopy,
    Stage,
    rank_identity,
)

from .weight_pool import NO, SETTINGS, SPECS, Pool, Sender, answer, raw

LIMIT = 3.0
"""Time limit of a test in seconds. A test that takes longer hangs."""
OFFER = PeerCopyOffer("127.0.0.1", 1, "digest")
OLD, NEW = ["old/0", "old/1"], ["new/0", "new/1"]


class TwoRanks(Pool):
    """Workers of two ranks. The ranks of worker 0 are ``OLD``. ``NEW`` is worker 1."""

    def __init__(self) -> None:
        super().__init__(0, host=lambda worker: "a", keep="auto")
        self.add(0, OLD)

    def add(self, worker: int, names: list[str]) -> None:
        for rank, name in enumerate(names):
            identity = rank_identity(name.encode(), rank)
            self.identities[identity] = name  # type: ignore[assignment]
            self.channel.add_rank(worker, rank, identity)
            assert self.on_peer(identity, encode(RankHello(SETTINGS)))

    def answers(self, name: str, message: Any, value: Any, error: Any = None) -> None:
        identity = rank_identity(name.encode(), int(name[-1]))
        assert self.on_peer(identity, encode(RankAnswer(message.id, "", error, raw(value))))

    async def all_next(self, names: list[str], kind: type[Any]) -> list[Any]:
        return [await self.next(name, kind) for name in names]

    async def update(self) -> None:
        """Update worker 0, which then keeps its weights."""
        sender = Sender(self, "s")
        task = asyncio.create_task(self.channel.updates.update(UpdateRequest(specs=SPECS), sender))
        for name in OLD:
            self.answers(name, await self.next(name, Describe), ModelDescription(SPECS, []))
        for kind in (Join, Prepare, Stage, Commit):
            messages = await self.all_next(OLD, kind)
            if kind in (Join, Stage):
                message = await self.next("s", kind)
                self.channel.updates.sender_answered(sender, answer(message))
            for name, message in zip(OLD, messages, strict=True):
                identity = rank_identity(name.encode(), int(name[-1]))
                assert self.on_peer(identity, encode(answer(message)))
        for name, message in zip(OLD, await self.all_next(OLD, KeepWeights), strict=True):
            self.answers(name, message, 100)
        await task
        await self.channel.kept.ended()

    def sync(self, worker: int) -> asyncio.Task[bool]:
        return asyncio.create_task(self.channel.sync(worker, 1000.0, lambda: None))


def played(test: Callable[[TwoRanks], Awaitable[None]]) -> Callable[[], None]:
    async def play() -> None:
        async with asyncio.timeout(LIMIT):
            pool = TwoRanks()
            await pool.update()
            await test(pool)
            assert pool.asked.empty(), pool.asked.get_nowait()
            assert len(pool.channel.updates._questions) == 0
            await pool.channel.close()

    return lambda: asyncio.run(play())


@played
async def test_the_ranks_restore_with_one_id(pool: TwoRanks) -> None:
    pool.on_lost(0)
    pool.add(0, NEW)
    synced = pool.sync(0)
    messages = await pool.all_next(NEW, RestoreWeights)
    assert len({message.id for message in messages}) == 1
    for name, message in zip(reversed(NEW), messages, strict=True):
        pool.answers(name, message, value=True)
    assert await synced


@played
async def test_only_one_rank_has_kept_weights(pool: TwoRanks) -> None:
    """The other rank must not stay held."""
    pool.on_lost(0)
    pool.add(0, NEW)
    synced = pool.sync(0)
    messages = await pool.all_next(NEW, RestoreWeights)
    for name, message, value in zip(NEW, messages, (True, False), strict=True):
        pool.answers(name, message, value)
    await pool.all_next(NEW, CancelCopy)
    assert not await synced


@pytest.mark.parametrize("first", [0, 1])
def test_the_ranks_receive_with_one_id(first: int) -> None:
    """The senders may answer in any order."""

    @played
    async def play(pool: TwoRanks) -> None:
        pool.add(1, NEW)
        synced = pool.sync(1)
        offers = await pool.all_next(OLD, SendPeerCopy)
        received = {}
        for rank in (first, 1 - first):
            pool.answers(OLD[rank], offers[rank], OFFER)
            received[rank] = await pool.next(NEW[rank], ReceivePeerCopy)
        assert received[0].id == received[1].id
        for rank in (0, 1):
            pool.answers(NEW[rank], received[rank], None)
        assert await synced

    play()


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("started", [True, False])
def test_one_rank_cannot_receive(failing: int, started: bool) -> None:
    """The other rank stops, whether its copy has started or not. The pool reports the cause."""

    @played
    async def play(pool: TwoRanks) -> None:
        pool.channel.kept.forget_all()
        pool.add(1, NEW)
        synced = pool.sync(1)
        offers = await pool.all_next(OLD, SendPeerCopy)
        other = 1 - failing
        if started:
            pool.answers(OLD[other], offers[other], OFFER)
            waiting = await pool.next(NEW[other], ReceivePeerCopy)
        pool.answers(OLD[failing], offers[failing], OFFER)
        message = await pool.next(NEW[failing], ReceivePeerCopy)
        pool.answers(NEW[failing], message, None, NO)
        for name in (OLD[failing], NEW[failing], NEW[other]):
            await pool.next(name, CancelCopy)
        assert not synced.done()
        if started:
            pool.answers(NEW[other], waiting, None, ErrorBody("WeightUpdateError", "stopped"))
        else:
            pool.answers(OLD[other], offers[other], OFFER)
        for name in (OLD[other], NEW[other]):
            await pool.next(name, CancelCopy)
        with pytest.raises(WeightUpdateError, match=r"no$"):
            await synced

    play()
