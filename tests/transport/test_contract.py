"""The promises of ``sglrl.transport.base`` for every transport."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from sglrl.errors import Closed
from sglrl.transport.base import WorkerTransport

from .links import Inbox, Link

Join = Callable[[bytes], WorkerTransport]


async def connected(link: Link, join: Join, inbox: Inbox, name: bytes) -> WorkerTransport:
    """Return a worker's end that has sent hello. Only then does the driver know the worker."""
    worker = join(name)
    before = len(inbox.got)
    worker.send([b"hello"])
    assert (await inbox.reach(before + 1))[-1] == (name, [b"hello"])
    return worker


async def test_messages_of_several_frames_arrive_whole(link: Link, join: Join) -> None:
    driver, worker_got = Inbox(), Inbox()
    link.router.start(driver)
    worker = await connected(link, join, driver, b"w0")
    worker.start(worker_got)
    frames = [b"", b"one", bytes(range(256)), b"", memoryview(b"last"), bytearray(b"!")]
    plain = [bytes(f) for f in frames]
    worker.send(frames)
    assert link.router.send(b"w0", frames)
    assert (await driver.reach(2))[1] == (b"w0", plain)
    assert await worker_got.reach(1) == [plain]
    assert all(type(frame) is bytes for frame in [*worker_got.got[0], *driver.got[1][1]])


async def test_order_is_kept_per_peer(link: Link, join: Join) -> None:
    driver = Inbox()
    link.router.start(driver)
    workers = {name: join(name) for name in (b"a", b"b", b"c")}
    for n in range(300):
        for worker in workers.values():
            worker.send([b"%d" % n])
    got = await driver.reach(900)
    for name in workers:
        assert [frames for peer, frames in got if peer == name] == [[b"%d" % n] for n in range(300)]


async def test_what_was_sent_before_start_is_delivered(link: Link, join: Join) -> None:
    driver, worker_got = Inbox(), Inbox()
    worker = join(b"w0")
    worker.send([b"early"])
    link.router.start(driver)
    assert await driver.reach(1) == [(b"w0", [b"early"])]
    assert link.router.send(b"w0", [b"early too"])
    worker.start(worker_got)
    assert await worker_got.reach(1) == [[b"early too"]]


async def test_send_never_calls_back_at_once(link: Link, join: Join) -> None:
    driver, worker_got = Inbox(), Inbox()
    link.router.start(driver)
    worker = await connected(link, join, driver, b"w0")
    worker.start(worker_got)
    link.router.send(b"w0", [b"x"])
    worker.send([b"y"])
    assert worker_got.got == []
    assert len(driver.got) == 1
    await worker_got.reach(1)
    await driver.reach(2)


async def test_unknown_peer(link: Link, join: Join) -> None:
    driver = Inbox()
    link.router.start(driver)
    assert link.router.send(b"nobody", [b"x"]) is False
    assert link.router.send(b"nobody", [b"x", b"y" * (1 << 20)]) is False
    await connected(link, join, driver, b"w0")
    assert link.router.send(b"w0", [b"x"]) is True
    assert link.router.send(b"w1", [b"x"]) is False


async def test_a_callback_may_answer(link: Link, join: Join) -> None:
    """Each side sends from inside its callback, a thousand times back and forth."""
    done = asyncio.get_running_loop().create_future()
    worker = join(b"w0")

    def on_driver(peer: bytes, frames: list[bytes]) -> None:
        assert link.router.send(peer, frames)

    def on_worker(frames: list[bytes]) -> None:
        n = int(frames[0])
        if n == 1000:
            done.set_result(n)
        else:
            worker.send([b"%d" % (n + 1)])

    link.router.start(on_driver)
    worker.start(on_worker)
    worker.send([b"0"])
    assert await done == 1000


async def test_nothing_is_called_after_close(link: Link, join: Join) -> None:
    """Messages are in flight to two ends when they close.

    The messages of two open ends show that time has passed.
    """
    driver, worker_got, other_got = Inbox(), Inbox(), Inbox()
    link.router.start(driver)
    worker = await connected(link, join, driver, b"w0")
    other = await connected(link, join, driver, b"w1")
    worker.start(worker_got)
    other.start(other_got)
    for _ in range(100):
        link.router.send(b"w0", [b"x"])
    worker.close()
    link.router.send(b"w1", [b"x"])
    await other_got.reach(1)
    assert worker_got.got == []
    for _ in range(100):
        other.send([b"y"])
    before = list(driver.got)
    link.router.close()
    for _ in range(3):
        await asyncio.to_thread(bool)
    assert driver.got == before


async def test_closing_inside_a_callback_ends_the_callbacks(link: Link, join: Join) -> None:
    driver, first = Inbox(), asyncio.Event()
    link.router.start(driver)
    worker = await connected(link, join, driver, b"w0")
    got: list[Any] = []

    def once(frames: list[bytes]) -> None:
        got.append(frames)
        worker.close()
        first.set()

    for n in range(10):
        link.router.send(b"w0", [b"%d" % n])
    worker.start(once)
    await first.wait()
    for _ in range(3):
        await asyncio.to_thread(bool)
    assert got == [[b"0"]]


async def test_closed_ends_refuse(link: Link, join: Join) -> None:
    link.router.start(Inbox())
    worker = join(b"w0")
    worker.start(Inbox())
    worker.close()
    link.router.close()
    with pytest.raises(Closed):
        worker.send([b"x"])
    with pytest.raises(Closed):
        link.router.send(b"w0", [b"x"])
    worker.close()
    link.router.close()


async def test_a_callback_that_raises_costs_its_own_message_only(link: Link, join: Join) -> None:
    loop = asyncio.get_running_loop()
    seen: list[Any] = []
    loop.set_exception_handler(lambda loop, context: seen.append(context.get("exception")))
    driver, worker_got = Inbox(), Inbox()

    def on_driver(peer: bytes, frames: list[bytes]) -> None:
        driver(peer, frames)
        if frames[0] in (b"0", b"5", b"9"):
            raise RuntimeError(frames[0])

    def on_worker(frames: list[bytes]) -> None:
        worker_got(frames)
        if frames[0] in (b"0", b"5", b"9"):
            raise RuntimeError(frames[0])

    worker = join(b"w0")
    for n in range(10):
        worker.send([b"%d" % n])
    link.router.start(on_driver)
    assert [f[0] for _, f in await driver.reach(10)] == [b"%d" % n for n in range(10)]
    for n in range(10):
        assert link.router.send(b"w0", [b"%d" % n])
    worker.start(on_worker)
    assert [f[0] for f in await worker_got.reach(10)] == [b"%d" % n for n in range(10)]
    await asyncio.to_thread(bool)
    assert [str(error) for error in seen] == ["b'0'", "b'5'", "b'9'"] * 2


async def test_a_worker_that_raises_costs_the_others_nothing(link: Link, join: Join) -> None:
    seen: list[Any] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda loop, context: seen.append(context.get("exception")))
    driver = Inbox()
    link.router.start(driver)
    names = [b"w%d" % i for i in range(4)]
    inboxes = {name: Inbox() for name in names}

    def deliver_to(name: bytes) -> Callable[[list[bytes]], None]:
        def on_message(frames: list[bytes]) -> None:
            inboxes[name](frames[0])
            if name in (b"w0", b"w2"):
                raise RuntimeError(name)

        return on_message

    for name in names:
        worker = await connected(link, join, driver, name)
        worker.start(deliver_to(name))
    for n in range(3):
        for name in names:
            assert link.router.send(name, [b"%d" % n])
    for inbox in inboxes.values():
        assert await inbox.reach(3) == [b"0", b"1", b"2"]
    await asyncio.to_thread(bool)
    assert sorted(map(str, seen)) == ["b'w0'"] * 3 + ["b'w2'"] * 3


async def test_large_frames(link: Link, join: Join) -> None:
    driver, worker_got = Inbox(), Inbox()
    link.router.start(driver)
    worker = await connected(link, join, driver, b"w0")
    worker.start(worker_got)
    sizes = [(64 << 10) - 1, 64 << 10, 192 << 10, (192 << 10) + 1, 1 << 20, 15 << 20]
    for size in sizes:
        large = bytes([size % 251]) * size
        worker.send([b"head", memoryview(large), b"tail"])
        assert link.router.send(b"w0", [b"head", large, b"tail"])
    to_driver = [frames for _, frames in (await driver.reach(1 + len(sizes)))[1:]]
    assert to_driver == await worker_got.reach(len(sizes))
    assert [len(frames[1]) for frames in to_driver] == sizes
    assert all(f[1] == bytes(f[1][:1]) * len(f[1]) and f[2] == b"tail" for f in to_driver)
    # Nobody can write to the frames, whether they are ZeroMQ's own memory or not.
    assert all(memoryview(f[1]).readonly for f in to_driver)


async def test_bursts_in_both_directions_at_once(link: Link, join: Join) -> None:
    """A ZeroMQ socket signals an arrival once, by an edge that a send may swallow."""
    total, burst = 20_000, 500
    driver, worker_got = Inbox(), Inbox()
    link.router.start(driver)
    worker = await connected(link, join, driver, b"w0")
    worker.start(worker_got)

    async def flood(send: Callable[[bytes], object]) -> None:
        for start in range(0, total, burst):
            for n in range(start, start + burst):
                send(b"%d" % n)
            await asyncio.sleep(0)

    await asyncio.gather(
        flood(lambda body: link.router.send(b"w0", [body])),
        flood(lambda body: worker.send([body])),
        driver.reach(total + 1),
        worker_got.reach(total),
    )
    wanted = [b"%d" % n for n in range(total)]
    assert [frames[0] for _, frames in driver.got[1:]] == wanted
    assert [frames[0] for frames in worker_got.got] == wanted


async def test_many_peers(link: Link, join: Join) -> None:
    driver = Inbox()
    link.router.start(driver)
    inboxes = {b"w%d" % n: Inbox() for n in range(50)}
    for name, inbox in inboxes.items():
        worker = join(name)
        worker.start(inbox)
        worker.send([name])
    assert sorted(await driver.reach(50)) == sorted((name, [name]) for name in inboxes)
    for name in inboxes:
        assert link.router.send(name, [name, b"answer"])
    for name, inbox in inboxes.items():
        assert await inbox.reach(1) == [[name, b"answer"]]
