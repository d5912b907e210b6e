"""Nodes that wait for programs (``sglrl node --listen``), and the invitations of a program.

A program invites such a node: it connects to the node and sends its own address. The node then
connects to this address like any other node. When its session with the program has ended, the node
waits for the next invitation.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable
from typing import Final

import msgspec

from ..core.node_session import MESSAGE_BYTES
from ..errors import Closed, ProtocolError
from ..transport.addresses import address_towards
from ..transport.base import DriverKeys
from ..transport.zmq import ZmqDealer, ZmqRouter
from ..wire.codec import Buffer, decode_of_connection, encode
from ..wire.nodes import Invite, Refuse
from ..wire.processes import ClientKeys, Environment
from .node import Node, NodeSettings, Refused

logger = logging.getLogger("sglrl.node")

_AGAIN_SECONDS: Final = 5.0
"""Seconds until a node that was busy or not reachable is invited again."""


class ListeningNode:
    """A node that serves the programs that invite it, one after the other.

    Args:
        address: the address at which this node listens for invitations.
        keys: the secret key of this node and the public keys of programs. None: connections are not
            encrypted.
        settings: the settings of the node. Each invitation replaces ``address`` in them.
        environment: the versions of this Python and its packages.
    """

    def __init__(
        self,
        address: str,
        keys: DriverKeys | None,
        settings: NodeSettings,
        environment: Environment,
    ) -> None:
        self._settings = settings
        self._environment = environment
        self._node: Node | None = None
        self._serving = ""
        """The address of the program that this node serves now."""
        self._again = False
        """Whether the program at ``_serving`` has lost the session and invited the node again."""
        self._invited: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._router = ZmqRouter(
            address,
            max_message_bytes=MESSAGE_BYTES,
            keys=keys,
            insecure=keys is None,
            heartbeat_timeout=settings.heartbeat_timeout,
        )
        self.address = address

    async def run(self) -> None:
        """Serve programs until ``stop``."""
        self._router.start(self._on_message)
        logger.info("waiting for a program at %s", self.address)
        try:
            while address := await self._invited:
                self._serving, self._again = address, False
                settings = msgspec.structs.replace(self._settings, address=address)
                self._node = Node(settings, self._environment, once=True)
                try:
                    await self._node.run()
                except Refused as error:
                    logger.error("%s", error)
                self._node, self._serving = None, ""
                if self._invited.result() and not self._again:
                    self._invited = asyncio.get_running_loop().create_future()
                    logger.info("waiting for a program at %s", self.address)
        finally:
            self._router.close()

    def stop(self) -> None:
        """End ``run``. If there is a session, first end it with ``Goodbye``."""
        if self._node is not None:
            self._node.stop()
        if self._invited.done():
            self._invited = asyncio.get_running_loop().create_future()
        self._invited.set_result("")

    def _on_message(self, identity: bytes, frames: list[Buffer]) -> None:
        try:
            message = decode_of_connection(frames[0])
        except (ProtocolError, IndexError) as error:
            logger.error("a message of a program is wrong: %s", error)
            return
        if not isinstance(message, Invite):
            return
        if message.address == self._serving:
            # A program that has lost one node invites all its nodes again. The lost node is the one
            # that is not connected.
            self._again = self._node is not None and not self._node.connected
        elif self._invited.done():
            reason = f"it serves another program, at {self._serving or self._invited.result()}"
            with contextlib.suppress(Closed):
                self._router.send(identity, [encode(Refuse(reason))])
        else:
            self._invited.set_result(message.address)


class Invitations:
    """Invites nodes that wait for programs, and invites them again after they restart.

    Args:
        nodes: the addresses of the nodes.
        keys: the keys of the connections to the nodes. None: connections are not encrypted.
        own: the address at which this program listens for nodes.
        heartbeat_timeout: see ``Hosts``.
    """

    def __init__(
        self,
        nodes: tuple[str, ...],
        keys: ClientKeys | None,
        own: str,
        heartbeat_timeout: float | None,
    ) -> None:
        self._guests = [_Guest(node, keys, own, heartbeat_timeout) for node in nodes]

    def send(self) -> None:
        """Invite all nodes. A node that has a session with this program ignores the invitation."""
        for guest in self._guests:
            guest.invite()

    def close(self) -> None:
        for guest in self._guests:
            guest.close()


class _Guest:
    """The connection to one node that waits for programs."""

    def __init__(
        self, address: str, keys: ClientKeys | None, own: str, heartbeat_timeout: float | None
    ) -> None:
        self._address = address
        self._invitation = encode(Invite(address_towards(address, own)))
        self._open: Callable[[Callable[[], None]], ZmqDealer] = lambda on_break: ZmqDealer(
            address,
            f"program/{secrets.token_hex(8)}".encode(),
            max_message_bytes=MESSAGE_BYTES,
            keys=keys,
            on_break=on_break,
            heartbeat_timeout=heartbeat_timeout,
        )
        self._loop = asyncio.get_running_loop()
        self._dealer: ZmqDealer | None = None
        self._again: asyncio.TimerHandle | None = None
        self._closed = False
        self._connect()

    def _connect(self) -> None:
        if self._closed:
            return

        def broken() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._on_break, dealer)

        if self._dealer is not None:
            self._dealer.close()
        self._dealer = dealer = self._open(broken)
        dealer.start(self._on_message)
        self.invite()

    def invite(self) -> None:
        assert self._dealer is not None
        with contextlib.suppress(Closed):
            self._dealer.send([self._invitation])

    def _on_break(self, dealer: ZmqDealer) -> None:
        if dealer is self._dealer:
            self._later(self._connect)

    def _on_message(self, frames: list[Buffer]) -> None:
        with contextlib.suppress(ProtocolError, IndexError):
            message = decode_of_connection(frames[0])
            if isinstance(message, Refuse):
                logger.warning("the node at %s: %s", self._address, message.reason)
                self._later(self.invite)

    def _later(self, act: Callable[[], None]) -> None:
        if self._again is not None:
            self._again.cancel()
        self._again = self._loop.call_later(_AGAIN_SECONDS, act)

    def close(self) -> None:
        self._closed = True
        if self._again is not None:
            self._again.cancel()
        if self._dealer is not None:
            self._dealer.close()
