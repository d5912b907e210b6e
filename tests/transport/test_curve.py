"""Which peers may connect: keys, strangers, and connections without keys."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
import zmq

from sglrl.errors import Closed, UsageError
from sglrl.transport.curve_keys import add_client, make_keys, read_client_keys, read_driver_keys
from sglrl.transport.zmq import ZmqDealer, ZmqPolledDealer, ZmqRouter, key_pair
from sglrl.wire.processes import ClientKeys

from .links import Inbox
from .test_zmq import watching

SMALL = 1 << 20
FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    folder = tmp_path / "keys"
    make_keys(folder)
    return folder


@pytest.fixture
def router(keys: Path) -> Iterator[ZmqRouter]:
    made = ZmqRouter("tcp://0.0.0.0:*", max_message_bytes=SMALL, keys=read_driver_keys(keys))
    yield made
    made.close()


def dealer(router: ZmqRouter, name: bytes, keys: ClientKeys | None) -> closing[ZmqDealer]:
    return closing(ZmqDealer(router.address, name, max_message_bytes=SMALL, keys=keys))


async def test_those_of_the_folder_and_the_workers_are_let_in(
    router: ZmqRouter, keys: Path
) -> None:
    inbox, answers = Inbox(), Inbox()
    router.start(inbox)
    with (
        dealer(router, b"trainer", read_client_keys(keys)) as trainer,
        dealer(router, b"worker", router.worker_keys) as worker,
    ):
        for end in (trainer, worker):
            end.start(answers)
            end.send([b"hello"])
        assert sorted(await inbox.reach(2)) == [(b"trainer", [b"hello"]), (b"worker", [b"hello"])]
        assert router.send(b"trainer", [b"1"])
        assert router.send(b"worker", [b"2"])
        assert sorted(await answers.reach(2)) == [[b"1"], [b"2"]]
    assert router.refused == 0


async def test_a_polled_end_has_keys_too(router: ZmqRouter) -> None:
    inbox = Inbox()
    router.start(inbox)
    polled = ZmqPolledDealer(
        router.address, b"engine", max_message_bytes=SMALL, keys=router.worker_keys
    )
    polled.send([b"hello"])
    assert await inbox.reach(1) == [(b"engine", [b"hello"])]
    assert router.send(b"engine", [b"you"])
    assert await asyncio.to_thread(polled.wait, 60.0)
    assert polled.receive() == [b"you"]
    polled.close()


def unknown(known: ClientKeys) -> ClientKeys:
    public, secret = key_pair()
    return ClientKeys(driver=known.driver, public=public, secret=secret)


def liar(known: ClientKeys) -> ClientKeys:
    """Return keys with an admitted public key and a wrong secret key."""
    return ClientKeys(driver=known.driver, public=known.public, secret=key_pair()[1])


def misled(known: ClientKeys) -> ClientKeys:
    """Return keys with a wrong public key of the driver."""
    return ClientKeys(driver=key_pair()[0], public=known.public, secret=known.secret)


def say(end: ZmqDealer, what: bytes) -> None:
    """Send to a driver that may already have refused this peer."""
    with suppress(Closed):
        end.send([what])


@pytest.mark.parametrize("stranger", [unknown, liar, misled, None])
async def test_strangers_are_not_heard(
    router: ZmqRouter, keys: Path, stranger: Callable[[ClientKeys], ClientKeys] | None
) -> None:
    inbox = Inbox()
    router.start(inbox)
    known = read_client_keys(keys)
    with (
        watching(router.socket, *FAILED, any_one=True) as refused,
        dealer(router, b"stranger", stranger and stranger(known)) as end,
    ):
        say(end, b"let me in")
        await refused
        assert (router.refused > 0) == (stranger is unknown)
        with dealer(router, b"trainer", known) as trainer:
            trainer.send([b"hello"])
            assert await inbox.reach(1) == [(b"trainer", [b"hello"])]


async def test_a_key_that_was_taken_away(keys: Path) -> None:
    add_client(keys, "second")
    (keys / "trainer.public").unlink()
    router = ZmqRouter("tcp://127.0.0.1:*", max_message_bytes=SMALL, keys=read_driver_keys(keys))
    inbox = Inbox()
    router.start(inbox)
    with (
        watching(router.socket, *FAILED, any_one=True) as refused,
        dealer(router, b"trainer", read_client_keys(keys / "trainer.secret")) as end,
    ):
        say(end, b"hello")
        await refused
    with dealer(router, b"second", read_client_keys(keys / "second.secret")) as end:
        end.send([b"hello"])
        assert await inbox.reach(1) == [(b"second", [b"hello"])]
    router.close()


async def test_nobody_is_let_in_when_nobody_can_be_asked(router: ZmqRouter, keys: Path) -> None:
    inbox = Inbox()
    router.start(inbox)
    assert router._authenticator is not None
    router._authenticator.close()
    with (
        watching(router.socket, *FAILED, any_one=True) as refused,
        dealer(router, b"trainer", read_client_keys(keys)) as end,
    ):
        say(end, b"hello")
        await refused
    assert inbox.got == []


async def test_two_drivers_in_one_process_have_keys_of_their_own(tmp_path: Path) -> None:
    inboxes, routers, folders = [], [], []
    for name in ("one", "two"):
        folders.append(tmp_path / name)
        make_keys(folders[-1])
        inboxes.append(Inbox())
        routers.append(
            ZmqRouter(
                "tcp://127.0.0.1:*", max_message_bytes=SMALL, keys=read_driver_keys(folders[-1])
            )
        )
        routers[-1].start(inboxes[-1])
    for router, inbox, folder in zip(routers, inboxes, folders, strict=True):
        with dealer(router, b"me", read_client_keys(folder)) as end:
            end.send([b"hello"])
            assert await inbox.reach(1) == [(b"me", [b"hello"])]
        router.close()


def test_where_to_connect(keys: Path) -> None:
    for address, here in (
        ("tcp://0.0.0.0:*", "tcp://127.0.0.1:"),
        ("tcp://[::]:*", "tcp://[::1]:"),
    ):
        router = ZmqRouter(address, max_message_bytes=SMALL, keys=read_driver_keys(keys))
        port = router.address.rsplit(":", 1)[1]
        assert router.address == f"{here}{port}"
        assert router.outer_address.startswith("tcp://")
        assert router.outer_address.endswith(f":{port}")
        assert "0.0.0.0" not in router.outer_address
        assert "[::]" not in router.outer_address
        router.close()
    router = ZmqRouter("tcp://127.0.0.2:*", max_message_bytes=SMALL)
    assert router.address == router.outer_address
    router.close()


@pytest.mark.parametrize(
    "address", ["tcp://no-such-interface:*", "tcp://192.0.2.77:*", "tcp://0.0.0.0", "tcp"]
)
def test_where_nobody_can_listen(keys: Path, address: str) -> None:
    with pytest.raises(UsageError, match=f"cannot listen on {re.escape(address)}: [^(]*; name"):
        ZmqRouter(address, max_message_bytes=SMALL, keys=read_driver_keys(keys))


def test_a_port_that_is_taken(router: ZmqRouter) -> None:
    with pytest.raises(UsageError, match="Address already in use"):
        ZmqRouter(router.address, max_message_bytes=SMALL)


def test_keys_are_for_tcp(keys: Path) -> None:
    with pytest.raises(UsageError, match="keys= is for tcp"):
        ZmqRouter("ipc:///tmp/x", max_message_bytes=SMALL, keys=read_driver_keys(keys))


async def test_insecure_is_said_aloud(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "sglrl.transport"):
        router = ZmqRouter("tcp://0.0.0.0:*", max_message_bytes=SMALL, insecure=True)
    assert "accepts any peer" in caplog.text
    inbox = Inbox()
    router.start(inbox)
    with dealer(router, b"me", None) as end:
        end.send([b"hello"])
        assert await inbox.reach(1) == [(b"me", [b"hello"])]
    router.close()
