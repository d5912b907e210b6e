"""The coordinator of weight updates, when the connection to a worker breaks and is made again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from sglrl.weights.update_request import UpdateRequest
from sglrl.wire.calls import Ready
from sglrl.wire.codec import encode
from sglrl.wire.weights import (
    Abort,
    Commit,
    Join,
    Prepare,
    RankHello,
    Rejoin,
    Stage,
    rank_identity,
)

from .weight_pool import SETTINGS, SPECS, Pool, Sender, answer

READY = Ready(1, 1, 1, [])


def played(test: Callable[[Pool, Sender], Awaitable[None]]) -> Callable[[], None]:
    """Run a test with a pool of two workers that have had an update."""

    async def play() -> None:
        pool = Pool(2)
        pool.channel.workers_return = True
        sender = Sender(pool, "a")
        update = begin(pool, sender)
        await pool.describes_itself()
        await pool.goes_well(sender, [0, 1], Join, Prepare, Stage, Commit)
        await update
        await test(pool, sender)
        assert pool.asked.empty()
        await pool.channel.close()

    def run() -> None:
        asyncio.run(play())

    run.__name__ = test.__name__
    run.__doc__ = test.__doc__
    return run


def begin(pool: Pool, sender: Sender) -> asyncio.Task[object]:
    return asyncio.create_task(pool.channel.updates.update(UpdateRequest(specs=SPECS), sender))


def leave(pool: Pool, worker: int) -> None:
    pool.starting.add(worker)
    pool.channel.on_away(worker)


def come_back(pool: Pool, worker: int) -> None:
    pool.starting.discard(worker)
    pool.channel.on_ready(worker, READY)


def hello(pool: Pool, worker: int, connection: int, *, dirty: bool = False) -> bool:
    message = RankHello(SETTINGS, connection, dirty)
    return pool.on_peer(rank_identity(b"w%d" % worker, 0), encode(message))


@played
async def test_a_worker_keeps_its_weights(pool: Pool, sender: Sender) -> None:
    """Its connection for weights did not break. It takes part in the next update."""
    leave(pool, 0)
    come_back(pool, 0)
    assert not pool.channel.must_sync(0)
    await pool.next(0, Rejoin)
    update = begin(pool, sender)
    await asyncio.sleep(0)
    assert hello(pool, 0, 0)
    await pool.goes_well(sender, [0, 1], Join, Prepare, Stage, Commit)
    await update
    assert pool.channel.versions.of == {0: 2, 1: 2}
    assert pool.expelled == []


@played
async def test_a_rank_that_has_said_hello_is_not_asked(pool: Pool, sender: Sender) -> None:
    leave(pool, 0)
    assert hello(pool, 0, 1)
    come_back(pool, 0)
    assert not pool.channel.must_sync(0)
    # It was asked before its hello arrived: the answer changes nothing.
    assert hello(pool, 0, 1)
    assert pool.expelled == []


@played
async def test_the_weights_of_a_worker_that_leaves_an_update_are_not_known(
    pool: Pool, sender: Sender
) -> None:
    update = begin(pool, sender)
    await pool.goes_well(sender, [0, 1], Prepare, Stage)
    commits = [await pool.next(worker, Commit) for worker in (0, 1)]
    leave(pool, 0)
    pool.say(1, answer(commits[1]))
    await update
    assert pool.channel.versions.of == {0: -1, 1: 2}
    assert hello(pool, 0, 1)
    come_back(pool, 0)
    assert pool.channel.must_sync(0)


@played
async def test_a_rank_with_half_of_an_update_is_ended(pool: Pool, sender: Sender) -> None:
    leave(pool, 0)
    assert hello(pool, 0, 1, dirty=True)
    assert pool.expelled == [0]


@played
async def test_only_the_connection_for_weights_breaks(pool: Pool, sender: Sender) -> None:
    """The worker serves on. Its rank is asked whether it takes part."""
    assert hello(pool, 0, 1)
    await pool.next(0, Rejoin)
    assert hello(pool, 0, 1)
    assert pool.expelled == []
    update = begin(pool, sender)
    await pool.goes_well(sender, [0, 1], Join, Prepare)
    # In an update, messages may be lost.
    assert hello(pool, 0, 2)
    assert pool.expelled == [0]
    for who in (0, 1, "a"):
        await pool.next(who, Stage)
    pool.on_lost(0)
    await pool.goes_well(sender, [1], Abort)
    await pool.goes_well(sender, [1], Join, Prepare, Stage, Commit)
    await update


@pytest.mark.parametrize("returns", [False, True])
@pytest.mark.parametrize("connection", [0, 1])
def test_hello_of_a_worker_that_was_never_away(connection: int, returns: bool) -> None:
    """A second hello on the same connection is dropped, and any of a worker that cannot return."""

    async def play() -> None:
        pool = Pool(2)
        pool.channel.workers_return = returns
        assert hello(pool, 0, connection) == (returns and connection > 0)
        await pool.channel.close()

    asyncio.run(play())
