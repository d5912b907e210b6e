"""The daemon that starts workers on its machine for a remote driver: ``sglrl node ADDRESS``."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final

import msgspec

from ..core.node_session import CHECK_SECONDS, MESSAGE_BYTES, MessageMissing, Session
from ..driver.environment import environment
from ..errors import Closed, ProtocolError, SglrlError
from ..transport.addresses import ip_of
from ..transport.zmq import ZmqDealer, ask
from ..wire.calls import PROTOCOL_VERSION
from ..wire.codec import Buffer, decode_of_connection, decode_to_node, encode
from ..wire.nodes import (
    Acknowledge,
    Admit,
    ClosePool,
    FromNode,
    Goodbye,
    NodeHello,
    Numbered,
    OpenPool,
    Refuse,
    ToNode,
    ToPool,
)
from ..wire.processes import ClientKeys, Environment
from .node_pool import NodePool

logger = logging.getLogger("sglrl.node")

_GOODBYE_SECONDS: Final = 2.0
"""Maximum seconds to wait until the driver answers ``Goodbye``."""
_LINGER_SECONDS: Final = 0.2
"""Seconds in which the last message is sent before the connection is closed."""
_BACK_OFF: Final = (0.0, 0.2, 0.5, 1.0, 2.0)
"""Seconds from each break to the next connection. The last value repeats until the driver admits
this node."""
_PATIENCE: Final = 10.0
"""Seconds without an answer after which a warning is logged."""


_PROCESS: Final = secrets.token_hex(8)
"""A random text. Together with the process id, it identifies this process uniquely."""


class Refused(SglrlError):
    """The driver cannot use this node."""


class NodeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The resources that a node offers, and its connection to the driver.

    Attributes:
        address: the address at which the driver listens.
        keys: the keys of the connection. None: the connection is not encrypted.
        name: the name of this host in messages.
        gpus: the GPUs of this host, as entries for ``CUDA_VISIBLE_DEVICES``.
        cores: number of CPU cores of this host.
        orphan_timeout: seconds without a connection to the driver after which all workers are
            killed.
        heartbeat_timeout: seconds without data after which the connection counts as broken.
    """

    address: str
    keys: ClientKeys | None
    name: str
    gpus: tuple[str, ...]
    cores: int
    orphan_timeout: float
    heartbeat_timeout: float | None


class Node:
    """Starts workers on this machine for a driver on another machine.

    After every break, the node connects with a new identity. A message of an old connection can
    therefore not be mistaken for a message of the new connection.

    Args:
        settings: the settings of the node.
        environment: the versions of this Python and its packages.
        once: whether ``run`` returns when a session ends, or when the driver does not answer.
    """

    def __init__(
        self, settings: NodeSettings, environment: Environment, *, once: bool = False
    ) -> None:
        self._settings = settings
        self._environment = environment
        self._once = once
        self._session: Session | None = None
        self._dealer: ZmqDealer | None = None
        self._pools: dict[int, _PoolTask] = {}
        self._orphaned: asyncio.TimerHandle | None = None
        self._impatient: asyncio.TimerHandle | None = None
        self._retry: asyncio.TimerHandle | None = None
        self._breaks = 0
        """Number of connections that broke since the driver last admitted this node."""
        self._stopping = False
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Serve the driver until ``stop``.

        Raises:
            Refused: the driver cannot use this node.
        """
        self._connect()
        checks = asyncio.ensure_future(self._check())
        try:
            await self._ended
        finally:
            checks.cancel()
            self._end_session()
            self._disconnect()
            if self._impatient is not None:
                self._impatient.cancel()

    @property
    def connected(self) -> bool:
        """Whether there is a session, and its connection is not known to be broken."""
        return self._session is not None and self._session.connected

    def stop(self) -> None:
        """Send ``Goodbye`` to the driver, wait for its answer for a short time, and end ``run``."""
        self._stopping = True
        if self._session is None or not self._session.connected:
            self._end()
            return
        self._send([encode(Goodbye())])
        asyncio.get_running_loop().call_later(_GOODBYE_SECONDS, self._end)

    def _fail(self, error: BaseException) -> None:
        """End ``run`` with an unexpected error. The driver then replaces the workers."""
        if not self._ended.done():
            self._ended.set_exception(error)

    def _end(self) -> None:
        if not self._ended.done():
            self._ended.set_result(None)

    # --- the connection ---------------------------------------------------------------------------

    def _connect(self) -> None:
        """Open a new connection and send ``NodeHello``. ZeroMQ tries until the driver listens."""
        self._disconnect()
        loop = asyncio.get_running_loop()

        def broken() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._on_break, dealer)

        settings = self._settings
        self._dealer = dealer = ZmqDealer(
            settings.address,
            f"node/{secrets.token_hex(8)}".encode(),
            max_message_bytes=MESSAGE_BYTES,
            keys=settings.keys,
            on_break=broken,
            heartbeat_timeout=settings.heartbeat_timeout,
        )
        dealer.start(self._on_message)
        session = self._session
        hello = NodeHello(
            protocol=PROTOCOL_VERSION,
            name=settings.name,
            environment=self._environment,
            gpus=settings.gpus,
            cores=settings.cores,
            orphan_timeout=settings.orphan_timeout,
            boot=_boot(),
            session="" if session is None else session.id,
            received=0 if session is None else session.received,
            program=ip_of(settings.address),
            process=f"{os.getpid()}-{_PROCESS}",
        )
        self._send([encode(hello)])
        if self._impatient is None:
            self._impatient = loop.call_later(_PATIENCE, self._complain)

    def _disconnect(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        if self._dealer is not None:
            self._dealer.close()
            self._dealer = None

    def _complain(self) -> None:
        if self._once:
            logger.warning("no answer from %s for %g s", self._settings.address, _PATIENCE)
            self._end()
            return
        logger.warning(
            "no answer from %s for %g s: its name is unknown, no program listens there, a firewall "
            "is between, or it does not accept this key; 'sglrl doctor --hosts %s' says which; "
            "still trying",
            self._settings.address,
            _PATIENCE,
            self._settings.address,
        )

    def _on_break(self, dealer: ZmqDealer) -> None:
        if dealer is not self._dealer or self._ended.done():
            return
        if self._session is not None and self._session.connected:
            self._session.disconnect()
            logger.warning(
                "the connection to %s is broken; the workers are killed in %g s unless it returns",
                self._settings.address,
                self._settings.orphan_timeout,
            )
            loop = asyncio.get_running_loop()
            self._orphaned = loop.call_later(self._settings.orphan_timeout, self._give_up)
        # A driver that rejects the key closes every connection at once.
        delay = _BACK_OFF[min(self._breaks, len(_BACK_OFF) - 1)]
        self._breaks += 1
        self._disconnect()
        self._retry = asyncio.get_running_loop().call_later(delay, self._connect)

    def _give_up(self) -> None:
        logger.warning("the driver has not returned: all workers are killed")
        self._end_session()
        if self._once:
            self._end()
            return
        # The waiting ``NodeHello`` has the id of the ended session, so send a new one.
        self._connect()

    def _send(self, frames: list[bytes]) -> None:
        if self._dealer is not None:
            with contextlib.suppress(Closed):
                self._dealer.send(frames)

    async def _check(self) -> None:
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            if self._session is not None:
                self._session.acknowledge()

    # --- the session ------------------------------------------------------------------------------

    def _on_message(self, frames: list[Buffer]) -> None:
        try:
            message = decode_of_connection(frames[0])
            match message:
                case Admit():
                    self._admitted(message)
                case Refuse(reason=reason):
                    if not self._ended.done():
                        self._ended.set_exception(Refused(f"refused by the driver: {reason}"))
                case Goodbye():
                    if self._stopping:
                        self._end()
                    elif self._session is not None:
                        logger.info("the driver has closed its hosts")
                        self._send([encode(Goodbye())])
                        self._end_session()
                        if self._once:
                            # The driver waits for this answer, so send it before the end.
                            loop = asyncio.get_running_loop()
                            loop.call_later(_LINGER_SECONDS, self._end)
                case Numbered() | Acknowledge() if self._session and self._session.connected:
                    # Late messages of an old connection are ignored: the driver sends them again.
                    if self._session.receive(message):
                        self._handle(decode_to_node(frames[1]))
        except MessageMissing as error:
            logger.warning("the connection has lost a message: %s", error)
            assert self._dealer is not None
            self._on_break(self._dealer)
        except (ProtocolError, IndexError) as error:
            logger.error("a message of the driver is wrong: %s", error)
            self._end_session()
            self._connect()

    def _admitted(self, message: Admit) -> None:
        for timer in (self._orphaned, self._impatient):
            if timer is not None:
                timer.cancel()
        self._orphaned = self._impatient = None
        self._breaks = 0
        if self._session is None or self._session.id != message.session:
            self._end_session()
            self._session = Session(message.session, self._send)
            logger.info("connected to %s", self._settings.address)
        else:
            logger.info("connected to %s again", self._settings.address)
        self._session.connect(message.received)

    def _end_session(self) -> None:
        """Kill all workers and forget the session."""
        if self._orphaned is not None:
            self._orphaned.cancel()
            self._orphaned = None
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()
        self._session = None

    def _report(self, message: FromNode) -> None:
        if self._session is not None and message.pool in self._pools:
            self._session.send(message)

    def _handle(self, message: ToNode) -> None:
        match message:
            case OpenPool(pool=number, preload=preload, env=env):
                pool = NodePool(number, preload, env, self._report, self._outer_address)
                self._pools[number] = _PoolTask(pool, self._fail)
                self._pools[number].put(pool.open())
            case ToPool(pool=number, message=order) if number in self._pools:
                task = self._pools[number]
                task.put(task.pool.handle(order))
            case ClosePool(pool=number) if number in self._pools:
                self._pools.pop(number).close()

    def _outer_address(self, address: str) -> str:
        """Return the address at which this machine reaches a socket of the driver.

        The host is the host to which this node connects. The port is the port of the socket.
        """
        host = self._settings.address.rpartition(":")[0]
        return f"{host}:{address.rpartition(':')[2]}"


def _boot() -> str:
    """Return the id of this machine's last boot (see random(4) of Linux), or "" if unknown."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    return ""


def say_hello(address: str, keys: ClientKeys | None, seconds: float) -> Admit | Refuse:
    """Ask a program whether it would use a node of this environment.

    Raises:
        Closed: there is no answer. The message has the reason.
    """
    hello = NodeHello(
        protocol=PROTOCOL_VERSION,
        name=socket.gethostname(),
        environment=environment(),
        gpus=(),
        cores=1,
        orphan_timeout=0.0,
        question=True,
    )
    answer = decode_of_connection(ask(address, keys, encode(hello), seconds))
    if not isinstance(answer, Admit | Refuse):
        raise ProtocolError(f"the program answers {answer!r}")
    return answer


class _PoolTask:
    """Executes the driver's messages for one pool, one after the other."""

    def __init__(self, pool: NodePool, fail: Callable[[BaseException], None]) -> None:
        self.pool = pool
        self._fail = fail
        self._orders: asyncio.Queue[Coroutine[Any, Any, None]] = asyncio.Queue()
        self._task = asyncio.ensure_future(self._run())
        self._task.add_done_callback(self._done)

    def put(self, order: Coroutine[Any, Any, None]) -> None:
        self._orders.put_nowait(order)

    async def _run(self) -> None:
        while True:
            await (await self._orders.get())

    def _done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def close(self) -> None:
        self._task.cancel()
        while not self._orders.empty():
            self._orders.get_nowait().close()
        self.pool.close()
