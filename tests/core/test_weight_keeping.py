"""One worker on each host keeps the current weights, and a replacement gets them from nearby."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import pytest

from sglrl.errors import SglrlError
from sglrl.weights.update_request import UpdateRequest
from sglrl.wire.codec import encode
from sglrl.wire.weights import (
    CancelCopy,
    Commit,
    Join,
    KeepWeights,
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

from .weight_pool import NO, SETTINGS, SPECS, Pool, Sender, raw

LIMIT = 20.0
"""Time limit of a test in seconds. A test that takes longer hangs."""
NEW = "new"
HOSTS = {0: "a", 1: "a", 2: "b"}


class Keeping(Pool):
    """Workers 0 and 1 on host a, worker 2 on host b."""

    def __init__(self) -> None:
        super().__init__(3, host=HOSTS.__getitem__, keeps=True)

    async def update(self, workers: list[int]) -> None:
        sender = Sender(self, "s")
        update = asyncio.create_task(self.channel.update(UpdateRequest(specs=SPECS), sender))
        if self.channel._description is None:
            await self.describes_itself()
        await self.goes_well(sender, workers, Join, Prepare, Stage, Commit)
        await update

    async def keeps(self, *workers: int, size: int = 100) -> None:
        """Let these workers keep their weights, and wait until the driver knows it."""
        for worker in workers:
            message = await self.next(worker, KeepWeights)
            assert message.version == self.channel.version
            self.say(worker, RankAnswer(message.id, "keep", None, raw(size)))
        assert self.channel._keeping is not None
        await self.channel._keeping

    def replace(self, worker: int) -> asyncio.Task[bool]:
        """Lose a worker, and bring its replacement to the current version."""
        self.on_lost(worker)
        identity = rank_identity(NEW.encode(), 0)
        self.identities[identity] = NEW  # type: ignore[assignment]
        self.channel.add_rank(worker, 0, identity)
        assert self.on_peer(identity, encode(RankHello(SETTINGS)))
        return asyncio.create_task(self.channel.sync(worker, 1000.0, lambda: None))

    def new_says(self, answer: RankAnswer) -> None:
        assert self.on_peer(rank_identity(NEW.encode(), 0), encode(answer))

    async def restores(self, *, there: bool = True) -> None:
        message = await self.next(NEW, RestoreWeights)
        assert message.version == self.channel.version
        self.new_says(RankAnswer(message.id, "restore", None, raw(there)))

    async def new_keeps(self) -> None:
        """Let the replacement keep its weights, and wait until the driver knows it."""
        message = await self.next(NEW, KeepWeights)
        self.new_says(RankAnswer(message.id, "keep", None, raw(100)))
        assert self.channel._keeping is not None
        await self.channel._keeping

    async def copies(self, sender: int) -> None:
        give = await self.next(sender, SendPeerCopy)
        offer = PeerCopyOffer("127.0.0.1", 1, "digest")
        self.say(sender, RankAnswer(give.id, "give", None, raw(offer)))
        take = await self.next(NEW, ReceivePeerCopy)
        self.new_says(RankAnswer(take.id, "take"))


def played(test: Callable[[Keeping], Awaitable[None]]) -> Callable[[], None]:
    async def play() -> None:
        async with asyncio.timeout(LIMIT):
            pool = Keeping()
            await pool.update([0, 1, 2])
            await test(pool)
            assert pool.asked.empty(), pool.asked.get_nowait()
            assert len(pool.channel._questions) == 0
            await pool.channel.close()

    return lambda: asyncio.run(play())


@played
async def test_one_worker_of_each_host(pool: Keeping) -> None:
    await pool.keeps(0, 2)
    assert [pool.channel.kept_bytes(worker) for worker in range(3)] == [100, 0, 100]
    await pool.update([0, 1, 2])
    await pool.keeps(0, 2, size=90)
    assert [pool.channel.kept_bytes(worker) for worker in range(3)] == [90, 0, 90]


@played
async def test_the_next_worker_keeps_if_one_cannot(pool: Keeping) -> None:
    first = await pool.next(0, KeepWeights)
    other = await pool.next(2, KeepWeights)
    pool.say(0, RankAnswer(first.id, "keep", NO))
    await pool.next(0, CancelCopy)
    second = await pool.next(1, KeepWeights)
    for worker, message in ((1, second), (2, other)):
        pool.say(worker, RankAnswer(message.id, "keep", None, raw(100)))
    assert pool.channel._keeping is not None
    await pool.channel._keeping
    assert [pool.channel.kept_bytes(worker) for worker in range(3)] == [0, 100, 100]


@played
async def test_a_peer_on_the_same_host_comes_first(pool: Keeping) -> None:
    await pool.keeps(0, 2)
    synced = pool.replace(0)
    await pool.copies(1)
    assert await synced


@played
async def test_the_memory_comes_before_another_host(pool: Keeping) -> None:
    await pool.keeps(0, 2)
    synced = pool.replace(2)
    await pool.restores()
    assert await synced


@played
async def test_memory_that_is_gone(pool: Keeping) -> None:
    """Its weights come from another host. Then it keeps them."""
    await pool.keeps(0, 2)
    synced = pool.replace(2)
    await pool.restores(there=False)
    await pool.copies(0)
    assert await synced
    await pool.new_keeps()


@played
async def test_without_any_source(pool: Keeping) -> None:
    """The worker is not killed when the memory is gone. It waits for the next update."""
    await pool.keeps(0, 2)
    pool.on_lost(0)
    pool.on_lost(1)
    synced = pool.replace(2)
    await pool.restores(there=False)
    assert not await synced


@played
async def test_a_failure_while_weights_are_restored(pool: Keeping) -> None:
    await pool.keeps(0, 2)
    pool.on_lost(0)
    pool.on_lost(1)
    synced = pool.replace(2)
    message = await pool.next(NEW, RestoreWeights)
    pool.new_says(RankAnswer(message.id, "restore", NO))
    await pool.next(NEW, CancelCopy)
    with pytest.raises(SglrlError, match="no"):
        await synced


@played
async def test_a_worker_is_lost_while_it_keeps(pool: Keeping) -> None:
    """What its host kept before is not used."""
    await pool.keeps(0, 2)
    await pool.update([0, 1, 2])
    message = await pool.next(0, KeepWeights)
    pool.say(0, RankAnswer(message.id, "keep", None, raw(100)))
    await pool.next(2, KeepWeights)
    synced = pool.replace(2)
    await pool.copies(0)
    assert await synced
    await pool.new_keeps()


@played
async def test_an_update_waits_until_weights_are_kept(pool: Keeping) -> None:
    first = await pool.next(0, KeepWeights)
    second = await pool.next(2, KeepWeights)
    update = asyncio.create_task(pool.update([0, 1, 2]))
    await asyncio.sleep(0)
    assert pool.asked.empty()
    for worker, message in ((0, first), (2, second)):
        pool.say(worker, RankAnswer(message.id, "keep", None, raw(100)))
    await update
    await pool.keeps(0, 2)


def test_a_host_without_room(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "sglrl.weights")

    @played
    async def test(pool: Keeping) -> None:
        asked = [await pool.next(worker, KeepWeights) for worker in (0, 2)]
        pool.say(2, RankAnswer(asked[1].id, "keep", NO))
        await pool.next(2, CancelCopy)
        pool.say(0, RankAnswer(asked[0].id, "keep", NO))
        await pool.next(0, CancelCopy)
        asked.append(await pool.next(1, KeepWeights))
        pool.say(1, RankAnswer(asked[2].id, "keep", NO))
        await pool.next(1, CancelCopy)
        assert pool.channel._keeping is not None
        await pool.channel._keeping

    test()
    said = [record.getMessage() for record in caplog.records]
    assert sorted(said) == [f"worker {n} could not keep its weights: no" for n in range(3)]
