"""Peers that violate the protocol cost other peers nothing."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from random import Random

import pytest
import zmq

from sglrl.transport.base import MAX_UNREAD, DriverKeys
from sglrl.transport.zmq import ZmqDealer, ZmqRouter, key_pair
from sglrl.transport.zmq.router import _MAX_UNTAKEN

from .links import Inbox
from .test_zmq import watching

SMALL = 1 << 20


@pytest.fixture(params=["ipc", "tcp"])
def router(request: pytest.FixtureRequest, folder: Path) -> Iterator[ZmqRouter]:
    address = "tcp://127.0.0.1:*" if request.param == "tcp" else f"ipc://{folder}/s"
    made = ZmqRouter(address, max_message_bytes=SMALL)
    yield made
    made.close()


def dealer(router: ZmqRouter, name: bytes) -> closing[ZmqDealer]:
    return closing(ZmqDealer(router.address, name, max_message_bytes=SMALL))


@pytest.fixture
def deaf(router: ZmqRouter) -> Iterator[zmq.Socket[bytes]]:
    """A peer that reads almost nothing from its connection."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVHWM, 1)
    socket.setsockopt(zmq.IDENTITY, b"deaf")
    socket.connect(router.address)
    yield socket
    socket.close(0)


async def test_a_peer_that_never_reads(router: ZmqRouter, deaf: zmq.Socket[bytes]) -> None:
    """The peer's unsent messages are bounded. Then it counts as lost; others are still served."""
    inbox, answers = Inbox(), Inbox()
    router.start(inbox)
    with dealer(router, b"good") as good:
        good.start(answers)
        deaf.send(b"hello")
        good.send([b"hello"])
        await inbox.reach(2)
        sent = 0
        while router.send(b"deaf", [b"x" * 100]):
            sent += 1
            assert sent < 4 * MAX_UNREAD
        assert sent >= MAX_UNREAD
        for n in range(100):
            assert not router.send(b"deaf", [b"x"])
            assert router.send(b"good", [b"%d" % n])
        assert await answers.reach(100) == [[b"%d" % n] for n in range(100)]


async def test_a_peer_that_floods_the_driver_waits(router: ZmqRouter) -> None:
    """While the driver is busy, the flood stays at its sender, and no message is lost."""
    total = 10 * _MAX_UNTAKEN
    inbox = Inbox()
    with dealer(router, b"loud") as loud, dealer(router, b"good") as good:
        for n in range(total):
            loud.send([b"%d" % n])
        good.send([b"hello"])
        router.start(inbox)
        got = await inbox.reach(total + 1)
    assert [f[0] for peer, f in got if peer == b"loud"] == [b"%d" % n for n in range(total)]
    # The other peer's message arrived long before the end of the flood.
    assert got.index((b"good", [b"hello"])) < total // 2


async def test_another_of_the_same_name_is_not_heard(router: ZmqRouter) -> None:
    inbox, answers = Inbox(), Inbox()
    router.start(inbox)
    with dealer(router, b"w0") as first, dealer(router, b"other") as other:
        first.start(answers)
        first.send([b"hello"])
        await inbox.reach(1)
        with (
            closing(zmq.Context.instance().socket(zmq.DEALER)) as second,
            watching(second, zmq.EVENT_HANDSHAKE_SUCCEEDED) as there,
        ):
            second.setsockopt(zmq.IDENTITY, b"w0")
            second.setsockopt(zmq.LINGER, 0)
            second.connect(router.address)
            await there
            for n in range(100):
                second.send(b"I am w0")
                other.send([b"%d" % n])
                assert router.send(b"w0", [b"%d" % n])
            first.send([b"still here"])
            got = await inbox.reach(102)
            assert [frames for _, frames in got].count([b"I am w0"]) == 0
            assert got.count((b"w0", [b"still here"])) == 1
            assert await answers.reach(100) == [[b"%d" % n] for n in range(100)]
            with pytest.raises(zmq.Again):
                second.recv(zmq.NOBLOCK)


@pytest.mark.parametrize("locked", [False, True])
async def test_bytes_that_are_no_conversation(folder: Path, locked: bool) -> None:
    """Send incomplete greetings, and noise after complete greetings, straight to the connection."""
    keys = DriverKeys(secret=key_pair()[1], clients=frozenset()) if locked else None
    router = ZmqRouter("tcp://127.0.0.1:*", max_message_bytes=SMALL, keys=keys)
    random = Random(4)
    inbox = Inbox()
    router.start(inbox)
    greeting = b"\xff" + b"\0" * 8 + b"\x7f\x03\x00NULL" + b"\0" * 48
    starts = [b"", b"GET / HTTP/1.1\r\n\r\n", greeting[:12], greeting, greeting + b"\4\x19\5READY"]
    with ExitStack() as left_open:
        good = left_open.enter_context(
            closing(
                ZmqDealer(router.address, b"good", max_message_bytes=SMALL, keys=router.worker_keys)
            )
        )
        for n in range(200):
            noisy = socket.create_connection(("127.0.0.1", int(router.address.rsplit(":", 1)[1])))
            left_open.callback(noisy.close)
            with suppress(OSError):
                noisy.sendall(random.choice(starts) + random.randbytes(random.randrange(200)))
            if n % 2:
                noisy.close()
            good.send([b"%d" % n])
        good.send([b"end"])
        while (b"good", [b"end"]) not in inbox.got:
            await inbox.reach(len(inbox.got) + 1)
    assert inbox.got == [(b"good", [frame]) for frame in (*(b"%d" % n for n in range(200)), b"end")]
    router.close()


@pytest.mark.parametrize("version", [1, 2])
async def test_versions_of_zeromq_in_which_a_few_bytes_are_a_peer(
    folder: Path, version: int
) -> None:
    """The driver closes the connection. Otherwise the peer could kill the driver's process.

    See ``ZmqRouter``.
    """
    router = ZmqRouter("tcp://127.0.0.1:*", max_message_bytes=SMALL)
    inbox = Inbox()
    router.start(inbox)
    name = b"\5\0evil" if version == 1 else b"\xff" + b"\0" * 8 + b"\x7f\1\5\0\4evil"
    message = b"\3\0hi" if version == 1 else b"\0\2hi"
    port = int(router.address.rsplit(":", 1)[1])
    with socket.create_connection(("127.0.0.1", port), timeout=300) as stranger:
        stranger.sendall(name + message)
        with suppress(ConnectionResetError):
            while stranger.recv(100):
                pass
    with dealer(router, b"good") as good:
        good.send([b"hello"])
        await inbox.reach(1)
    assert inbox.got == [(b"good", [b"hello"])]
    router.close()


@pytest.mark.parametrize("locked", [False, True])
async def test_handshakes_that_are_not_finished(folder: Path, locked: bool) -> None:
    """If there are too many, the oldest are closed. Peers that have finished theirs stay."""
    keys = DriverKeys(secret=key_pair()[1], clients=frozenset()) if locked else None
    router = ZmqRouter("tcp://127.0.0.1:*", max_message_bytes=SMALL, keys=keys)
    most = 4
    inbox = Inbox()
    router.start(inbox)
    with ExitStack() as stack:
        stack.callback(router.close)
        good = [
            stack.enter_context(
                closing(
                    ZmqDealer(
                        router.address, b"%d" % n, max_message_bytes=SMALL, keys=router.worker_keys
                    )
                )
            )
            for n in range(6)
        ]
        for end in good:
            end.send([b"hello"])
        await inbox.reach(6)
        router._monitor._most = most
        port = int(router.address.rpartition(":")[2])
        idle = []
        for _ in range(20):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            # ZeroMQ has accepted the connection when it sends its greeting.
            await reader.readexactly(1)
            writer.write(b"\xff" + b"\0" * 8 + b"\x7f")
            idle.append((reader, writer))
        for reader, _ in idle[:-most]:
            with suppress(ConnectionError):
                await reader.read()
        assert router.cut_off == 20 - most
        for end in good:
            end.send([b"still here"])
        await inbox.reach(12)
        for _, writer in idle:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()
