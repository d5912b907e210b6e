"""The coordinator copies a worker's weights to a replacement, and either may be lost at any time.

Other callers wait no longer than their timeout.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from sglrl.errors import SglrlError, UpdateInProgress, WeightUpdateError, WorkerLost
from sglrl.weights.deadline import Deadline
from sglrl.weights.local_sender import LocalSender
from sglrl.weights.update_request import UpdateRequest
from sglrl.wire.calls import ErrorBody
from sglrl.wire.codec import decode_to_rank, encode
from sglrl.wire.weights import (
    CancelCopy,
    Checksums,
    Commit,
    Describe,
    Join,
    ModelDescription,
    PeerCopyOffer,
    Prepare,
    Propose,
    RankAnswer,
    RankHello,
    ReceivePeerCopy,
    SenderAccepted,
    SendPeerCopy,
    Stage,
    rank_identity,
)

from .weight_pool import SETTINGS, SPECS, Pool, Sender, answer, raw

LIMIT = 20.0
"""Time limit of a test in seconds. A test that takes longer hangs."""
LONG = 1000.0
"""Seconds that a copy may take. No test waits for them."""
NEW, NEWER = "new", "newer"
OFFER = PeerCopyOffer("127.0.0.1", 1, "digest")
NO = ErrorBody("WeightUpdateError", "no")


class Replaced(Pool):
    """Three workers with version 1. Worker 1 was lost.

    Its replacement is ``NEW``, and the replacement of ``NEW`` is ``NEWER``.
    """

    def __init__(self) -> None:
        super().__init__(3)
        self.served: list[str] = []

    async def update(self) -> None:
        sender = Sender(self, "a")
        update = asyncio.create_task(
            self.channel.updates.update(UpdateRequest(specs=SPECS), sender)
        )
        await self.describes_itself()
        await self.goes_well(sender, [0, 1, 2], Join, Prepare, Stage, Commit)
        assert (await update).version == 1

    def replace(self, name: str, *, hello: bool = True, worker: int = 1) -> None:
        """Give the worker's index to another process."""
        identity = rank_identity(name.encode(), 0)
        self.identities[identity] = name  # type: ignore[assignment]
        self.channel.add_rank(worker, 0, identity)
        if hello:
            self.hello(name)

    def hello(self, name: str) -> None:
        assert self.on_peer(rank_identity(name.encode(), 0), encode(RankHello(SETTINGS)))

    def lose(self, worker: int, successor: str = "") -> None:
        """Lose the worker. A replacement may be there at once."""
        self.on_lost(worker)
        if successor:
            self.replace(successor, worker=worker)

    def sync(self, timeout: float = LONG) -> asyncio.Task[bool]:
        serve = lambda: self.served.append("served")  # noqa: E731
        return asyncio.create_task(self.channel.sync(1, timeout, serve))

    def say(self, who: int | str, answer: RankAnswer, sender: Sender | None = None) -> None:
        if sender is None and isinstance(who, str):
            assert self.on_peer(rank_identity(who.encode(), 0), encode(answer))
        else:
            super().say(who, answer, sender)

    def offers(self, who: int | str, give: SendPeerCopy) -> None:
        self.say(who, RankAnswer(give.id, "give", None, raw(OFFER)))

    def takes(self, who: int | str, take: ReceivePeerCopy, error: ErrorBody | None = None) -> None:
        self.say(who, RankAnswer(take.id, "take", error))

    async def copies(self, sender: int | str, receiver: str) -> None:
        """Play a whole copy from one worker to another."""
        self.offers(sender, await self.next(sender, SendPeerCopy))
        take = await self.next(receiver, ReceivePeerCopy)
        assert (take.version, take.offer) == (1, OFFER)
        self.takes(receiver, take)


def played(test: Callable[[Replaced], Awaitable[None]]) -> Callable[[], None]:
    async def play() -> None:
        async with asyncio.timeout(LIMIT):
            pool = Replaced()
            await pool.update()
            pool.on_lost(1)
            await test(pool)
            assert pool.asked.empty(), pool.asked.get_nowait()
            assert not pool.channel.versions.lock.locked()
            assert len(pool.channel.updates._questions) == 0
            await pool.channel.close()

    def run() -> None:
        asyncio.run(play())

    run.__name__ = test.__name__
    run.__doc__ = test.__doc__
    return run


async def is_lost(pool: Replaced, sync: asyncio.Task[bool]) -> None:
    """Check that the copy fails at once, and that the replacement does not have the weights."""
    with pytest.raises(WorkerLost, match="worker 1 was lost"):
        await sync
    assert pool.served == []
    assert pool.channel.versions.of == {0: 1, 1: 0, 2: 1}


@played
async def test_a_copy(pool: Replaced) -> None:
    pool.replace(NEW)
    sync = pool.sync()
    await pool.copies(0, NEW)
    assert await sync
    assert pool.served == ["served"]
    assert pool.channel.versions.of == {0: 1, 1: 1, 2: 1}


@pytest.mark.parametrize("successor", ["", NEWER], ids=["", "and replaced"])
@pytest.mark.parametrize(
    "when",
    [
        "before it says hello",
        "while the sender is asked",
        "as the sender answers",
        "while it takes",
        "as it answers",
        "between two senders",
    ],
)
def test_the_receiver_is_lost(when: str, successor: str) -> None:
    @played
    async def play(pool: Replaced) -> None:
        pool.replace(NEW, hello="hello" not in when)
        sync = pool.sync()
        if "hello" in when:
            await asyncio.sleep(0)
            assert not sync.done()
            pool.lose(1, successor)
            await is_lost(pool, sync)
            return
        give = await pool.next(0, SendPeerCopy)
        if when == "while the sender is asked":
            pool.lose(1, successor)
        elif when == "as the sender answers":
            pool.offers(0, give)
            pool.lose(1, successor)
        elif when == "between two senders":
            pool.say(0, RankAnswer(give.id, "give", NO))
            pool.lose(1, successor)
        else:
            pool.offers(0, give)
            take = await pool.next(NEW, ReceivePeerCopy)
            if when == "as it answers":
                pool.takes(NEW, take)
            pool.lose(1, successor)
        if when != "as it answers":
            # The sender no longer waits for the receiver. No other worker gets a message.
            await pool.next(0, CancelCopy)
        await is_lost(pool, sync)

    play()


@pytest.mark.parametrize("replaced", [False, True], ids=["", "and replaced"])
@pytest.mark.parametrize("when", ["while it is asked", "as it answers", "while it gives"])
def test_the_sender_is_lost(when: str, replaced: bool) -> None:
    """The next worker sends its weights instead."""

    @played
    async def play(pool: Replaced) -> None:
        pool.replace(NEW)
        sync = pool.sync()
        give = await pool.next(0, SendPeerCopy)
        if when == "as it answers":
            pool.offers(0, give)
        elif when == "while it gives":
            pool.offers(0, give)
            await pool.next(NEW, ReceivePeerCopy)
        pool.lose(0, NEWER if replaced else "")
        await pool.next(NEW, CancelCopy)
        await pool.copies(2, NEW)
        assert await sync
        assert pool.channel.versions.of == {0: 0 if replaced else 1, 1: 1, 2: 1}

    play()


@played
async def test_the_next_giver_is_lost_and_replaced_meanwhile(pool: Replaced) -> None:
    """The replacement has no weights to send."""
    pool.replace(NEW)
    sync = pool.sync()
    give = await pool.next(0, SendPeerCopy)
    pool.lose(2, NEWER)
    pool.say(0, RankAnswer(give.id, "give", NO))
    for who in (0, NEW, NEW):
        await pool.next(who, CancelCopy)
    with pytest.raises(WorkerLost, match="worker 2 was lost"):
        await sync
    assert pool.served == []


@played
async def test_nobody_is_left_to_give(pool: Replaced) -> None:
    pool.replace(NEW)
    sync = pool.sync()
    await pool.next(0, SendPeerCopy)
    pool.lose(2)
    pool.lose(0)
    await pool.next(NEW, CancelCopy)
    await pool.next(NEW, CancelCopy)
    with pytest.raises(WorkerLost, match="worker 2 was lost"):
        await sync


@played
async def test_it_is_replaced_while_it_waits_for_an_update(pool: Replaced) -> None:
    """The new process is not taken for the old one, and has the weights of no update."""
    sender = Sender(pool, "b")
    update = asyncio.create_task(pool.channel.updates.update(UpdateRequest(specs=SPECS), sender))
    await pool.goes_well(sender, [0, 2], Join, Prepare, Stage)
    commits = [await pool.next(who, Commit) for who in (0, 2)]
    pool.replace(NEW)
    sync = pool.sync()
    await asyncio.sleep(0)
    pool.lose(1, NEWER)
    for who, commit in zip((0, 2), commits, strict=True):
        pool.say(who, answer(commit))
    assert (await update).workers == [0, 2]
    with pytest.raises(WorkerLost, match="worker 1 was lost"):
        await sync
    assert pool.served == []
    assert pool.channel.versions.of == {0: 2, 1: 0, 2: 2}


@played
async def test_nobody_answers(pool: Replaced) -> None:
    """All senders together have one timeout."""
    pool.replace(NEW)
    sync = pool.sync(0.2)
    first = await pool.next(0, SendPeerCopy)
    assert first.timeout <= 0.1
    for who in (0, NEW):
        await pool.next(who, CancelCopy)
    second = await pool.next(2, SendPeerCopy)
    assert second.timeout <= 0.1
    for who in (2, NEW):
        await pool.next(who, CancelCopy)
    with pytest.raises(SglrlError, match=r"did not (answer|get the weights) within"):
        await sync
    assert pool.served == []


@played
async def test_it_says_no_hello(pool: Replaced) -> None:
    pool.replace(NEW, hello=False)
    with pytest.raises(WeightUpdateError, match=r"within 0\.05 s"):
        await pool.sync(0.05)


class Calls:
    """The calls that wait for a copy, each made as its caller makes it."""

    def __init__(self, pool: Replaced) -> None:
        self.channel = pool.channel
        self.sender = Sender(pool, "b")
        self._local = LocalSender(pool.channel)

        async def ending(*args: Any) -> Sender:
            # This sender needs no torch.
            return self.sender

        self._local._ending = ending  # type: ignore[method-assign]

    def update(self, timeout: float, **options: Any) -> Awaitable[Any]:
        request = UpdateRequest(specs=SPECS, timeout=timeout, **options)
        return self.channel.updates.update(request, self.sender)

    def join(self, timeout: float) -> Awaitable[Any]:
        return self.channel.updates.join(self.sender, Deadline(timeout))

    def connect(self, timeout: float) -> Awaitable[Any]:
        return self._local.connect(None, "127.0.0.1", timeout)

    def checksums(self, timeout: float) -> Awaitable[Any]:
        return self.channel.checksums(["w"], timeout)


async def does(pool: Replaced, call: str, sender: Sender) -> None:
    """Let all receivers take part in the call."""
    kinds = {"checksums": [Checksums], "update": [Join, Prepare, Stage, Commit]}.get(call, [Join])
    for kind in kinds:
        for who in (0, NEW, 2):
            message = await pool.next(who, kind)
            if kind is Checksums:
                pool.say(who, RankAnswer(message.id, "checksums", None, raw([])))
            else:
                pool.say(who, answer(message))
        if kind in (Join, Stage):
            pool.say("b", answer(await pool.next("b", kind)), sender)


@pytest.mark.parametrize("ends", ["timeout", "cancelled"])
@pytest.mark.parametrize("call", ["update", "join", "connect", "checksums"])
def test_a_call_does_not_wait_for_a_copy_any_longer(call: str, ends: str) -> None:
    """Nothing of the call has begun. After the copy it can be made again."""

    @played
    async def play(pool: Replaced) -> None:
        pool.replace(NEW)
        sync = pool.sync()
        give = await pool.next(0, SendPeerCopy)
        calls = Calls(pool)
        called = getattr(calls, call)
        if ends == "timeout":
            with pytest.raises(
                UpdateInProgress,
                match=r"weight copy is running .* within 0\.05 s .* nothing has begun",
            ):
                await called(0.05)
        else:
            waiting = asyncio.ensure_future(called(LONG))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        assert pool.asked.empty()
        pool.offers(0, give)
        pool.takes(NEW, await pool.next(NEW, ReceivePeerCopy))
        assert await sync
        again = asyncio.ensure_future(called(LONG))
        await does(pool, call, calls.sender)
        await again

    play()


@played
async def test_an_update_that_does_not_wait(pool: Replaced) -> None:
    pool.replace(NEW)
    sync = pool.sync()
    give = await pool.next(0, SendPeerCopy)
    with pytest.raises(UpdateInProgress, match=r"running and wait is False; nothing has begun"):
        await Calls(pool).update(LONG, wait=False)
    pool.offers(0, give)
    pool.takes(NEW, await pool.next(NEW, ReceivePeerCopy))
    assert await sync


@played
async def test_the_time_before_a_proposal_counts(pool: Replaced) -> None:
    """A sender in another process may have waited before it proposes an update."""
    told: asyncio.Queue[Any] = asyncio.Queue()
    identity = f"sender/{pool.channel.address.partition('#')[2]}/1".encode()
    ranks = pool.send_to_peer

    def send_to_peer(to: bytes, frame: bytes) -> bool:
        if to != identity:
            return ranks(to, frame)
        told.put_nowait(decode_to_rank(frame))
        return True

    pool.send_to_peer = send_to_peer  # type: ignore[method-assign]
    assert pool.on_peer(identity, encode(RankHello(SETTINGS)))
    assert isinstance(await told.get(), SenderAccepted)
    pool.replace(NEW)
    sync = pool.sync()
    give = await pool.next(0, SendPeerCopy)
    proposal = Propose(1, SPECS, None, "continue", "auto", False, 1, LONG, True, waited=LONG)
    assert pool.on_peer(identity, encode(proposal))
    ended = await told.get()
    assert ended.error.kind == "UpdateInProgress"
    proposal = Propose(2, SPECS, None, "continue", "auto", False, 1, LONG, True, waited=math.nan)
    assert pool.on_peer(identity, encode(proposal))
    ended = await told.get()
    assert ended.error.kind == "UsageError"
    pool.offers(0, give)
    pool.takes(NEW, await pool.next(NEW, ReceivePeerCopy))
    assert await sync


@played
async def test_a_worker_is_replaced_before_an_update_begins(pool: Replaced) -> None:
    """The worker is replaced while the update waits for the engines' description."""
    pool.replace(NEW)
    pool.channel.updates._description = None
    calls = Calls(pool)
    update = asyncio.ensure_future(calls.update(LONG))
    describe = await pool.next(0, Describe)
    pool.lose(1)
    pool.replace(NEWER, hello=False)
    pool.starting.add(1)
    pool.say(0, RankAnswer(describe.id, "describe", None, raw(ModelDescription(SPECS, []))))
    await pool.goes_well(calls.sender, [0, 2], Join, Prepare, Stage, Commit)
    assert (await update).workers == [0, 2]
    assert pool.channel.versions.of == {0: 2, 1: 0, 2: 2}
