"""Both ends notice when a TCP connection no longer carries data, and only then."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
from at_once import at_once
from proxy import Proxy

from sglrl.transport.base import DriverKeys
from sglrl.transport.zmq import ZmqDealer, ZmqPolledDealer, ZmqRouter, key_pair

from .links import Inbox

LIMIT = 1 << 20
TIMEOUT = 1.5
BUSY = ("dealer", "router")


@contextmanager
def router_of(kind: str) -> Iterator[ZmqRouter]:
    secret = key_pair()[1]
    keys = DriverKeys(secret=secret, clients=frozenset()) if kind == "curve" else None
    with closing(
        ZmqRouter(
            "tcp://127.0.0.1:*", max_message_bytes=LIMIT, keys=keys, heartbeat_timeout=TIMEOUT
        )
    ) as made:
        yield made


def dealer(
    router: ZmqRouter,
    address: str,
    on_break: Callable[[], None],
    kind: Any = ZmqDealer,
    timeout: float | None = TIMEOUT,
) -> Any:
    made = kind(
        address,
        b"w",
        max_message_bytes=LIMIT,
        keys=router.worker_keys,
        on_break=on_break,
        heartbeat_timeout=timeout,
    )
    return closing(made)


async def unknown(router: ZmqRouter) -> None:
    """Wait until the router no longer knows the peer.

    ZeroMQ's other thread removes a connection just after it has reported the disconnection.
    """
    while router.send(b"w", [b"x"]):  # noqa: ASYNC110
        await asyncio.sleep(0)


async def test_silent_connections() -> None:
    await at_once(silent, ["plain", "curve"], [ZmqDealer, ZmqPolledDealer], ["", *BUSY])


async def silent(keys: str, kind: Any, busy: str) -> None:
    """If ``busy``, this end sends all the time, so its heartbeats queue after other messages."""
    inbox, broken, told = Inbox(), asyncio.Event(), threading.Event()
    with router_of(keys) as router:
        router.start(inbox, None, broken.set)
        async with Proxy(router.address) as proxy:
            with dealer(router, proxy.address, told.set, kind) as end:
                end.send([b"hello"])
                await inbox.reach(1)
                assert router.send(b"w", [b"hello"])
                proxy.silence(0)
                large = bytes(LIMIT)
                for _ in range(32):
                    if busy == "dealer":
                        end.send([large])
                    elif busy == "router":
                        router.send(b"w", [large])
                assert await asyncio.to_thread(told.wait, 300)
                await broken.wait()
                await unknown(router)


async def test_an_end_notices_by_itself() -> None:
    """Only one end sends heartbeats. The other end does not need them."""
    await at_once(notices, BUSY)


async def notices(by: str) -> None:
    both: list[float | None] = [None, TIMEOUT]
    of_router, of_dealer = both if by == "dealer" else both[::-1]
    inbox, broken, told = Inbox(), asyncio.Event(), threading.Event()
    with closing(
        ZmqRouter("tcp://127.0.0.1:*", max_message_bytes=LIMIT, heartbeat_timeout=of_router)
    ) as router:
        router.start(inbox, None, broken.set)
        async with Proxy(router.address) as proxy:
            with dealer(router, proxy.address, told.set, timeout=of_dealer) as end:
                end.send([b"hello"])
                await inbox.reach(1)
                proxy.silence(0)
                if by == "dealer":
                    assert await asyncio.to_thread(told.wait, 300)
                else:
                    await broken.wait()
                    await unknown(router)


@pytest.mark.parametrize("keys", ["plain", "curve"])
async def test_a_driver_that_is_busy_in_python(keys: str) -> None:
    """Many messages wait for the driver meanwhile. No connection breaks, and no message is lost."""
    inbox, answers, told = Inbox(), Inbox(), threading.Event()
    with router_of(keys) as router:
        router.start(inbox)
        with dealer(router, router.address, told.set) as end:
            end.start(answers)
            end.send([b"hello"])
            await inbox.reach(1)
            for n in range(10_000):
                end.send([b"%d" % n])
            # Both ends share this loop. It is blocked for several times the time limit.
            time.sleep(3 * TIMEOUT)  # noqa: ASYNC251
            got = await inbox.reach(10_001)
            assert [frames for _, frames in got[1:]] == [[b"%d" % n] for n in range(10_000)]
            assert router.send(b"w", [b"still there"])
            assert await answers.reach(1) == [[b"still there"]]
            assert not told.is_set()
