"""The driver's end of the session with one node."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ..core.node_session import Session
from ..core.placement import Offer
from ..errors import Closed
from ..transport.zmq import ZmqRouter
from ..wire.codec import encode
from ..wire.nodes import Admit, Goodbye, NodeHello


class NodeLink:
    """One node and its session.

    Attributes:
        name: the name of the host, which is unique in the program.
        hello: the first message of the node.
        session: the session with the node. It survives broken connections.
    """

    def __init__(self, name: str, hello: NodeHello, session: str, router: ZmqRouter) -> None:
        self.name = name
        self.hello = hello
        self.session = Session(session, self._send)
        self._router = router
        self._identity = b""
        self._broken = False
        self._end: asyncio.TimerHandle | None = None

    @property
    def offer(self) -> Offer:
        return Offer(gpus=self.hello.gpus, cores=self.hello.cores)

    def admit(self, identity: bytes, received: int) -> None:
        """Continue the session on a new connection."""
        self._identity = identity
        if self._end is not None:
            self._end.cancel()
            self._end = None
        self._send([encode(Admit(self.session.id, self.session.received))])
        self.session.connect(received)

    def check(self, end: Callable[[NodeLink], None]) -> None:
        """Acknowledge messages, which also detects a broken connection.

        Args:
            end: ``end(link)`` is called if the node does not connect again within its orphan
                timeout, after which the node kills its workers.
        """
        if not self.session.connected:
            return
        self._broken = False
        self.session.acknowledge()
        if self._broken:
            self.lose(end)

    def lose(self, end: Callable[[NodeLink], None]) -> None:
        """Record that the connection is broken. ``check`` describes ``end``."""
        self.session.disconnect()
        loop = asyncio.get_running_loop()
        self._end = loop.call_later(self.hello.orphan_timeout, end, self)

    def say_goodbye(self) -> None:
        """Ask the node to end the session and kill its workers. The node answers ``Goodbye``."""
        if self.session.connected:
            self._send([encode(Goodbye())])

    def close(self) -> None:
        """End the session."""
        if self._end is not None:
            self._end.cancel()
        self.session.disconnect()

    def _send(self, frames: list[bytes]) -> None:
        try:
            if not self._router.send(self._identity, frames):
                self._broken = True
        except Closed:
            self._broken = True
