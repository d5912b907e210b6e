"""How the driver handles messages with a single error, while a client waits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from sglrl.actors.actor import Actor, endpoint, endpoints_of
from sglrl.actors.handles import StreamCaller, Target, UnaryCaller
from sglrl.client.client import Client
from sglrl.core.driver_listener import DriverListener
from sglrl.driver.driver import Driver
from sglrl.errors import ProtocolError
from sglrl.transport.base import MAX_UNREAD
from sglrl.transport.memory import MemoryDealer, MemoryRouter
from sglrl.wire.calls import PROTOCOL_VERSION, Item, ItemKind, Ready, Results, Starting
from sglrl.wire.codec import encode, split_frames
from sglrl.wire.engine import TokenChunk

from .harness import Pool
from .samples import ids, logprobs


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    async with Pool(1).client() as made:
        yield made


@pytest.fixture
def pool(client: Client) -> Pool:
    return cast(Pool, client.pool)


async def held(pool: Pool, count: int) -> list[int]:
    """Return the calls of the bad worker, once it holds ``count`` calls."""
    while len(found := pool.bad_worker.held) < count:
        pool.bad_worker.something.clear()
        await pool.bad_worker.something.wait()
    return found


async def delivered() -> None:
    """Wait until sent messages are delivered, in the loop's next turn."""
    await asyncio.sleep(0)
    await asyncio.sleep(0)


def say(pool: Pool, *items: Item, frames: tuple[bytes, ...] = ()) -> None:
    pool.router.take(pool.bad_identity, [encode(Results(list(items))), *frames])


NOT_TEXT = b"\x93\xc4\x00\xc4\x00\xa1\xff"


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(NOT_TEXT, id="finish is not UTF-8"),
        pytest.param(encode({"ids": b""}), id="a map"),
        pytest.param(encode(TokenChunk(b"\0" * 3)), id="three bytes of a token"),
        pytest.param(encode(TokenChunk(ids(1), b"")), id="no logprobs"),
        pytest.param(encode(TokenChunk(ids(1), logprobs(2))), id="too many logprobs"),
        pytest.param(encode(TokenChunk(b"", b"\0" * 6)), id="logprobs that are cut off"),
    ],
)
@pytest.mark.parametrize("kind", [ItemKind.CHUNK, ItemKind.DONE])
async def test_a_malformed_answer_fails_its_call_alone(
    client: Client, pool: Pool, body: bytes, kind: int
) -> None:
    first, second = (
        asyncio.ensure_future(
            client.generate(input_ids=[7], max_new_tokens=1, logprobs=True, worker=pool.bad)
        )
        for _ in range(2)
    )
    bad, good = await held(pool, 2)
    done = encode(TokenChunk(ids(7), logprobs(1), "length"))
    # Both items are in one message, so that one flush handles both.
    say(pool, Item(bad, kind, body), Item(good, ItemKind.DONE, done))
    assert (await second).output_ids.tolist() == [7]
    with pytest.raises(ProtocolError, match="malformed answer"):
        await first
    pool.bad_worker.work()


async def test_scores_that_are_too_few(client: Client, pool: Pool) -> None:
    task = asyncio.ensure_future(client.score([1, 2, 3], worker=pool.bad))
    (id_,) = await held(pool, 1)
    say(pool, Item(id_, ItemKind.DONE, encode(TokenChunk(b"", logprobs(2)))))
    with pytest.raises(ProtocolError, match="2 logprobs of 3 tokens"):
        await task


class Source(Actor):
    """Declares the endpoints that a worker may be called with."""

    @endpoint
    async def data(self) -> bytes:
        raise NotImplementedError

    @endpoint
    async def parts(self) -> AsyncIterator[bytes]:
        raise NotImplementedError
        yield b""


@pytest.mark.parametrize("counts", [(-1, 3), (2, 1), (1, 0), (0, 0), (1 << 62, 1), (1, 1 << 63)])
async def test_raw_frames_that_do_not_add_up(pool: Pool, counts: tuple[int, int]) -> None:
    """The message has two frames. It is dropped whole if its items declare another number."""
    specs = endpoints_of(Source)
    tasks = [
        asyncio.ensure_future(UnaryCaller(pool.driver, specs["data"], Target(pool.bad))())
        for _ in range(2)
    ]
    first, second = await held(pool, 2)
    before = pool.driver.dropped.count
    zero = encode(0)
    items = [
        Item(id_, ItemKind.DONE, zero, count)
        for id_, count in zip((first, second), counts, strict=True)
    ]
    say(pool, *items, frames=(b"a", b"b"))
    say(
        pool,
        Item(first, ItemKind.DONE, zero, 1),
        Item(second, ItemKind.DONE, zero, 1),
        frames=(b"good", b"too"),
    )
    assert [await task for task in tasks] == [b"good", b"too"]
    assert pool.driver.dropped.count == before + 1


async def test_a_frame_that_is_promised_and_missing(pool: Pool) -> None:
    """Another message, which has all its frames, arrives before."""
    specs = endpoints_of(Source)
    tasks = [
        asyncio.ensure_future(UnaryCaller(pool.driver, specs["data"], Target(pool.bad))())
        for _ in range(2)
    ]
    first, second = await held(pool, 2)
    say(pool, Item(first, ItemKind.DONE, encode(0), 1), frames=(b"good",))
    say(pool, Item(second, ItemKind.DONE, encode(0), 1))
    assert await tasks[0] == b"good"
    with pytest.raises(ProtocolError, match="raw frame 0 is missing"):
        await tasks[1]


async def test_a_stream_that_was_malformed_takes_no_more(pool: Pool) -> None:
    stream = StreamCaller(pool.driver, endpoints_of(Source)["parts"], Target(pool.bad))()
    task = asyncio.ensure_future(anext(stream))
    (id_,) = await held(pool, 1)
    say(pool, Item(id_, ItemKind.CHUNK, encode("no frame")))
    for _ in range(100):
        say(pool, Item(id_, ItemKind.CHUNK, encode(0), 1), frames=(b"x" * 1000,))
    with pytest.raises(ProtocolError, match="something else than it declares"):
        await task


def driver_and_worker() -> tuple[Driver, MemoryDealer, Any]:
    router = MemoryRouter()
    driver = Driver(router)
    driver.start()
    driver.workers.add(0, b"w")
    return driver, router.connect(b"w"), driver.fabric.members[0]


async def test_only_a_worker_that_starts_says_so() -> None:
    driver, dealer, member = driver_and_worker()
    said: list[str] = []

    class Starts(DriverListener):
        def on_starting(self, worker: int, stage: str) -> None:
            said.append(stage)

    driver.add_listener(Starts())
    ready = Ready(PROTOCOL_VERSION, 1, 5, [])
    for message in (Starting("one"), ready, Starting("two"), ready):
        dealer.send([encode(message)])
    await delivered()
    assert driver.dropped.count == 2
    assert said == ["one"]
    assert (member.state, member.window) == ("ready", 5)


@pytest.mark.parametrize("window", [0, -1, -(1 << 63)])
async def test_a_window_that_is_none(window: int) -> None:
    driver, dealer, member = driver_and_worker()
    dealer.send([encode(Ready(PROTOCOL_VERSION, 1, window, []))])
    await delivered()
    assert driver.dropped.count == 1
    assert member.state == "starting"


async def test_a_window_is_what_may_wait_unread_at_most() -> None:
    driver, dealer, member = driver_and_worker()
    dealer.send([encode(Ready(PROTOCOL_VERSION, 1, (1 << 64) - 1, []))])
    await driver.change()
    assert member.window == MAX_UNREAD // 2


def test_splitting() -> None:
    items = [Item(1, 1, frames=2), Item(2, 1), Item(3, 1, frames=1)]
    assert split_frames(items, [b"", b"a", b"b", b"c"]) == [[b"a", b"b"], [], [b"c"]]
    assert split_frames([], [b""]) == []
    for frames in ([b""], [b"", b"a", b"b"], [b"", b"a", b"b", b"c", b"d"]):
        with pytest.raises(ProtocolError):
            split_frames(items, frames)
