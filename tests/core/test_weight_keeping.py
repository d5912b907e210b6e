"""One worker on each host keeps the current weights, and a replacement gets them from nearby."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from sglrl.errors import SglrlError, WorkerLost
from sglrl.weights.kept import KeepMode
from sglrl.weights.update_report import UpdateReport
from sglrl.weights.update_request import UpdateRequest
from sglrl.wire.codec import encode
from sglrl.wire.weights import (
    Abort,
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

from .weight_pool import NO, SETTINGS, SPECS, Pool, Sender, answer, raw

LIMIT = 20.0
"""Time limit of a test in seconds. A test that takes longer hangs."""
NEW = "new"
HOSTS = {0: "a", 1: "a", 2: "b"}


class Keeping(Pool):
    """Workers 0 and 1 on host a, worker 2 on host b."""

    def __init__(self, workers: int = 3, keep: KeepMode = "host") -> None:
        super().__init__(workers, host=HOSTS.__getitem__, keep=keep)
        self.updating: asyncio.Task[UpdateReport]
        self.sender: Sender

    async def update(self, workers: list[int]) -> None:
        """Run an update until its workers have committed. It ends when hosts keep the weights."""
        sender = self.sender = Sender(self, "s")
        self.updating = asyncio.create_task(
            self.channel.updates.update(UpdateRequest(specs=SPECS), sender)
        )
        if self.channel.updates._description is None:
            await self.describes_itself()
        await self.goes_well(sender, workers, Join, Prepare, Stage, Commit)

    async def keeps(self, *workers: int, size: int = 100) -> None:
        """Let these workers keep their weights, and wait until the driver knows it."""
        for worker in workers:
            message = await self.next(worker, KeepWeights)
            assert message.version == self.channel.version
            self.say(worker, RankAnswer(message.id, "keep", None, raw(size)))
        await self.channel.kept.ended()
        await self.updating

    def lose(self, worker: int) -> None:
        """Replace a worker by one that has not got the current version yet."""
        self.on_lost(worker)
        identity = rank_identity(NEW.encode(), 0)
        self.identities[identity] = NEW  # type: ignore[assignment]
        self.channel.add_rank(worker, 0, identity)
        assert self.on_peer(identity, encode(RankHello(SETTINGS)))

    def replace(self, worker: int) -> asyncio.Task[bool]:
        """Lose a worker, and bring its replacement to the current version."""
        self.lose(worker)
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
        await self.channel.kept.ended()

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
            assert len(pool.channel.updates._questions) == 0
            await pool.channel.close()

    return lambda: asyncio.run(play())


@played
async def test_one_worker_of_each_host(pool: Keeping) -> None:
    await pool.keeps(0, 2)
    assert [pool.channel.kept.sizes.get(worker, 0) for worker in range(3)] == [100, 0, 100]
    await pool.update([0, 1, 2])
    await pool.keeps(0, 2, size=90)
    assert [pool.channel.kept.sizes.get(worker, 0) for worker in range(3)] == [90, 0, 90]


@played
async def test_the_next_worker_keeps_if_one_cannot(pool: Keeping) -> None:
    first = await pool.next(0, KeepWeights)
    other = await pool.next(2, KeepWeights)
    pool.say(0, RankAnswer(first.id, "keep", NO))
    await pool.next(0, CancelCopy)
    second = await pool.next(1, KeepWeights)
    for worker, message in ((1, second), (2, other)):
        pool.say(worker, RankAnswer(message.id, "keep", None, raw(100)))
    await pool.updating
    assert [pool.channel.kept.sizes.get(worker, 0) for worker in range(3)] == [0, 100, 100]


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
async def test_an_update_interrupts_the_copy_of_older_weights(pool: Keeping) -> None:
    """Each of many partial updates would otherwise wait for a copy of all weights."""
    first = pool.updating
    await pool.next(0, KeepWeights)
    await pool.next(2, KeepWeights)
    sender = Sender(pool, "s")
    second = asyncio.create_task(pool.channel.updates.update(UpdateRequest(specs=SPECS), sender))
    assert sorted([(await pool.asked.get())[0] for _ in range(2)]) == [0, 2]
    await pool.goes_well(sender, [0, 1, 2], Join, Prepare, Stage, Commit)
    assert (await first).version == 1
    pool.updating = second
    await pool.keeps(0, 2)
    assert second.result().version == 2


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
        await pool.updating

    test()
    said = [record.getMessage() for record in caplog.records]
    assert sorted(said) == [f"worker {n} could not keep its weights: no" for n in range(3)]


def run(test: Callable[[Keeping], Awaitable[None]], workers: int) -> None:
    """Run a test with ``keep_weights="auto"``."""

    async def play() -> None:
        async with asyncio.timeout(LIMIT):
            pool = Keeping(workers, "auto")
            await test(pool)
            assert pool.asked.empty(), pool.asked.get_nowait()
            await pool.channel.close()

    asyncio.run(play())


def test_auto_keeps_what_only_one_worker_has() -> None:
    async def test(pool: Keeping) -> None:
        await pool.update([0, 1])
        await pool.updating
        assert pool.asked.empty()
        pool.on_lost(1)
        await pool.keeps(0)
        await pool.update([0])
        assert not pool.updating.done()
        await pool.keeps(0)

    run(test, 2)


def test_the_only_worker_is_lost_before_its_weights_are_kept() -> None:
    """The sender still has the weights. It sends them to the replacement, as the same version."""

    async def test(pool: Keeping) -> None:
        versions: list[int] = []
        pool.channel.on_version.add(lambda: versions.append(pool.channel.version))
        await pool.update([0])
        await pool.next(0, KeepWeights)
        pool.lose(0)
        for kind in (Join, Prepare, Stage, Commit):
            message = await pool.next(NEW, kind)
            pool.new_says(answer(message))
            if kind in (Join, Stage):
                pool.say("s", answer(await pool.next("s", kind)), pool.sender)
        await pool.new_keeps()
        assert (await pool.updating).version == pool.channel.version == 1
        assert set(versions) == {1}

    run(test, 1)


@pytest.mark.parametrize("kind", [Prepare, Stage, Commit])
def test_an_update_that_loses_all_workers_again_and_again(kind: type[Any]) -> None:
    """It is given up after the third time. Nothing else is sent."""

    async def test(pool: Keeping) -> None:
        sender = Sender(pool, "s")
        update = asyncio.create_task(
            pool.channel.updates.update(UpdateRequest(specs=SPECS), sender)
        )
        await pool.describes_itself()
        kinds = (Join, Prepare, Stage, Commit)
        who: int | str = 0
        for _ in range(3):
            for step in kinds[: kinds.index(kind)]:
                message = await pool.next(who, step)
                pool.new_says(answer(message)) if who == NEW else pool.say(who, answer(message))
                if step in (Join, Stage):
                    pool.say("s", answer(await pool.next("s", step)), sender)
            await pool.next(who, kind)
            if kind is Stage:
                await pool.next("s", kind)
            pool.lose(0)
            if kind is not Commit:
                pool.say("s", answer(await pool.next("s", Abort)), sender)
            who = NEW
        with pytest.raises(WorkerLost, match="no worker is left to update"):
            await update
        assert pool.channel.version == 0

    run(test, 1)
