"""Features of the real transport only: sizes, addresses, strangers, and an end without a loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq
from zmq.utils.monitor import parse_monitor_message

from sglrl.errors import UsageError
from sglrl.transport.zmq import ZmqDealer, ZmqPolledDealer, ZmqRouter

from .links import Inbox

SMALL = 1 << 20


@pytest.fixture(params=["ipc", "tcp"])
def router(request: pytest.FixtureRequest, folder: Path) -> Iterator[ZmqRouter]:
    address = "tcp://127.0.0.1:*" if request.param == "tcp" else f"ipc://{folder}/s"
    made = ZmqRouter(address, max_message_bytes=SMALL)
    yield made
    made.close()


@pytest.fixture
def polled(router: ZmqRouter) -> Iterator[ZmqPolledDealer]:
    made = ZmqPolledDealer(router.address, b"engine", max_message_bytes=SMALL)
    yield made
    made.close()


@pytest.mark.parametrize(
    "address",
    [
        "tcp://0.0.0.0:*",
        "tcp://*:*",
        "tcp://192.168.0.1:5555",
        "tcp://[::]:*",
        "tcp://eth0:*",
        "tcp://127.evil.example:*",
        "tcp://127.0.0.1;0.0.0.0:5555",
        "tcp://localhost.example:*",
    ],
)
def test_beyond_loopback_is_refused(address: str) -> None:
    with pytest.raises(
        UsageError, match=r"not a loopback address; .* 'sglrl keys DIR' and pass keys="
    ):
        ZmqRouter(address, max_message_bytes=SMALL)


@pytest.mark.parametrize("address", ["inproc://x", "udp://127.0.0.1:1", "127.0.0.1:5555", ""])
def test_unknown_addresses(address: str) -> None:
    with pytest.raises(UsageError, match=r"unknown address .*; use ipc://PATH or tcp://127"):
        ZmqRouter(address, max_message_bytes=SMALL)


def test_a_port_is_chosen_and_told() -> None:
    for address in ("tcp://127.0.0.1:*", "tcp://127.0.0.2:*"):
        router = ZmqRouter(address, max_message_bytes=SMALL)
        assert router.address.startswith(address[:-1])
        assert router.address.rsplit(":", 1)[1].isdigit()
        router.close()


@contextmanager
def watching(
    socket: zmq.Socket[bytes], *events: int, any_one: bool = False
) -> Iterator[asyncio.Task[None]]:
    """Return a task that is done when the socket has reported these connection events in order.

    With ``any_one`` the task is done after any one of the events.
    """
    monitor = socket.get_monitor_socket(sum(events))

    def wait() -> None:
        wanted = list(events)
        while wanted:
            seen = parse_monitor_message(monitor.recv_multipart())["event"]
            if any_one:
                return
            if seen == wanted[0]:
                wanted.pop(0)

    task = asyncio.create_task(asyncio.to_thread(wait))
    yield task
    assert task.done()
    socket.disable_monitor()
    monitor.close(0)


async def test_a_message_too_large_is_dropped_and_harms_nobody_else(router: ZmqRouter) -> None:
    inbox = Inbox()
    router.start(inbox)
    broken = threading.Event()
    # This peer reconnects one second later. Until the router has forgotten the name, it ignores
    # other peers with the same name.
    loud = ZmqDealer(router.address, b"loud", max_message_bytes=SMALL, on_break=broken.set)
    good = ZmqDealer(router.address, b"good", max_message_bytes=SMALL)
    for dealer in (loud, good):
        dealer.send([b"hello"])
    await inbox.reach(2)
    for n in range(50):
        good.send([b"%d" % n])
    loud.send([b"x" * (SMALL + 1)])
    for n in range(50, 100):
        good.send([b"%d" % n])
    await inbox.reach(102)
    assert await asyncio.to_thread(broken.wait, 60.0)
    loud.send([b"I am back"])
    got = await inbox.reach(103)
    assert [f[0] for peer, f in got[2:] if peer == b"good"] == [b"%d" % n for n in range(100)]
    assert [f for peer, f in got[2:] if peer == b"loud"] == [[b"I am back"]]
    answers = Inbox()
    loud.start(answers)
    assert router.send(b"loud", [b"welcome"])
    assert await answers.reach(1) == [[b"welcome"]]
    loud.close()
    good.close()


async def test_a_message_of_no_frames_but_the_identity(router: ZmqRouter) -> None:
    """A stranger may send such a message, but our own ends never do. The driver drops it."""
    inbox = Inbox()
    router.start(inbox)
    dealer = ZmqDealer(router.address, b"w0", max_message_bytes=SMALL)
    dealer.send([b""])
    assert await inbox.reach(1) == [(b"w0", [b""])]
    dealer.close()


async def test_a_peer_that_left_is_unknown(router: ZmqRouter) -> None:
    """After the peer's disconnection ``send`` returns False."""
    inbox = Inbox()
    router.start(inbox)
    dealer = ZmqDealer(router.address, b"w0", max_message_bytes=SMALL)
    dealer.send([b"hello"])
    await inbox.reach(1)
    with watching(router.socket, zmq.EVENT_DISCONNECTED) as gone:
        dealer.close()
        await gone
    # The socket learns of the disconnection from ZeroMQ's own thread, a moment after the monitor.
    while router.send(b"w0", [b"x"]):
        await asyncio.to_thread(bool)


def test_polled_receive_never_waits(polled: ZmqPolledDealer) -> None:
    assert polled.receive() is None
    assert polled.wait(0.0) is False
    assert polled.wait(0.001) is False


async def test_polled_wait_ends_when_a_message_is_here(
    router: ZmqRouter, polled: ZmqPolledDealer
) -> None:
    inbox = Inbox()
    router.start(inbox)
    polled.send([b"hello", memoryview(b"frame")])
    assert await inbox.reach(1) == [(b"engine", [b"hello", b"frame"])]
    for n in range(3):
        assert router.send(b"engine", [b"%d" % n, b"frame"])
    assert polled.wait(60.0) is True
    got = []
    while len(got) < 3:
        assert polled.wait(60.0)
        while (frames := polled.receive()) is not None:
            got.append(frames)
    assert got == [[b"%d" % n, b"frame"] for n in range(3)]
    assert polled.wait(0.0) is False


async def test_polled_in_its_own_thread_under_load(router: ZmqRouter) -> None:
    """As the engine uses it: receive all messages, answer them, and wait when there are none."""
    total = 20_000
    inbox = Inbox()
    router.start(inbox)
    # Messages that still wait for room at the driver are lost when their sender closes.
    taken = threading.Event()

    def engine() -> int:
        dealer = ZmqPolledDealer(router.address, b"engine", max_message_bytes=SMALL)
        dealer.send([b"hello"])
        answered = 0
        while answered < total and dealer.wait(60.0):
            while (frames := dealer.receive()) is not None:
                dealer.send(frames)
                answered += 1
        taken.wait(60.0)
        dealer.close(linger=60.0)
        return answered

    working = asyncio.create_task(asyncio.to_thread(engine))
    await inbox.reach(1)
    for n in range(total):
        assert router.send(b"engine", [b"%d" % n])
        if n % 100 == 0:
            await asyncio.sleep(0)
    got = await inbox.reach(total + 1)
    taken.set()
    assert await working == total
    assert [frames[0] for _, frames in got[1:]] == [b"%d" % n for n in range(total)]


async def test_closing_with_linger_delivers_what_was_sent(router: ZmqRouter) -> None:
    inbox = Inbox()
    router.start(inbox)

    def leave() -> None:
        dealer = ZmqPolledDealer(router.address, b"engine", max_message_bytes=SMALL)
        dealer.send([b"bye"])
        dealer.close(linger=60.0)

    thread = threading.Thread(target=leave)
    thread.start()
    assert await inbox.reach(1) == [(b"engine", [b"bye"])]
    thread.join()
