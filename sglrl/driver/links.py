"""The connections to the workers, and the memory that they share with the driver."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Protocol

from ..core.calls import Call
from ..core.members import AWAY, STARTING, Member
from ..errors import Closed, ProtocolError
from ..transport.base import DriverTransport
from ..transport.shared_rows import RowsReader
from ..wire.calls import Cancel, Ready, Results
from ..wire.codec import Buffer, encode, split_frames

logger = logging.getLogger("sglrl.driver")


class LinkListener(Protocol):
    """Is notified of messages that cannot be sent, in a later tick of the event loop."""

    def on_refused(self, member: Member, call: Call, error: Exception) -> None:
        """A call cannot be encoded."""

    def on_unreachable(self, member: Member) -> None:
        """A worker is not connected, or does not read its messages."""


class Links:
    """Sends messages to workers. The transport addresses each worker by its identity.

    Args:
        encode_calls: returns the frames of one message with the given calls.

    Attributes:
        listener: is notified of messages that cannot be sent.
        members: the workers by their identities.
    """

    listener: LinkListener

    def __init__(
        self,
        transport: DriverTransport,
        encode_calls: Callable[[list[Call]], list[Any]],
        max_message_bytes: int,
    ) -> None:
        self._transport = transport
        self._encode_calls = encode_calls
        self._max_message_bytes = max_message_bytes
        self._loop = asyncio.get_running_loop()
        self._identities: dict[Member, bytes] = {}
        self.members: dict[bytes, Member] = {}

    def add(self, member: Member, identity: bytes) -> None:
        self.members[identity] = member
        self._identities[member] = identity

    def remove(self, member: Member) -> None:
        del self.members[self._identities.pop(member)]

    def send(self, member: Member, frames: list[Any]) -> None:
        """Send one message. A message to a worker that was removed is dropped."""
        identity = self._identities.get(member)
        if identity is None:
            # The worker was lost in the meantime.
            return
        try:
            sent = self._transport.send(identity, frames)
        except Closed:
            return
        if not sent:
            self._loop.call_soon(self._report, member)

    def send_calls(self, member: Member, calls: list[Call]) -> None:
        """Send calls in one message, or in several if they are too large for one."""
        try:
            frames = self._encode_calls(calls)
        except Exception as error:
            if len(calls) == 1:
                self._loop.call_soon(self.listener.on_refused, member, calls[0], error)
                return
            frames = []
        if not frames or (len(frames[0]) > self._max_message_bytes and len(calls) > 1):
            # A single call always fits into a message. This was checked when it was submitted.
            half = len(calls) // 2
            self.send_calls(member, calls[:half])
            self.send_calls(member, calls[half:])
            return
        self.send(member, frames)

    def probe(self) -> None:
        """Send an empty message to every worker, to find workers that are unreachable."""
        for member in list(self._identities):
            # A worker that is starting or away may not be connected. Other time limits apply to it.
            if member.state not in (STARTING, AWAY):
                self.send(member, [encode(Cancel([]))])

    def _report(self, member: Member) -> None:
        if member in self._identities:
            self.listener.on_unreachable(member)


class RawFrames:
    """Finds the raw frames of results, which are frames of the message or rows in shared memory.

    Attributes:
        readers: the open shared memory, for each worker that shares memory.
    """

    def __init__(self) -> None:
        self.readers: dict[Member, RowsReader] = {}

    def open(self, member: Member, ready: Ready) -> bool:
        """Open the shared memory that a worker offers. Return False without usable memory."""
        if ready.rows is None:
            return False
        try:
            self.readers[member] = RowsReader(ready.pid, ready.rows)
        except OSError as error:
            logger.debug("worker %d sends rows: %s", member.index, error)
            return False
        return True

    def close(self, member: Member) -> None:
        """Forget the memory of a lost worker. The memory stays open while its rows are in use."""
        self.readers.pop(member, None)

    def split(self, member: Member, message: Results, frames: list[Buffer]) -> list[list[Buffer]]:
        """Return the raw frames of each item of a message.

        Args:
            frames: the frames of the message. The first frame is the message itself.

        Raises:
            ProtocolError: the number of raw frames differs from the number in the items.
        """
        if message.slots:
            reader = self.readers.get(member)
            if reader is None:
                raise ProtocolError("it names shared memory that there is none of")
            frames = [*frames, *reader.views(message.slots)]
        return split_frames(message.items, frames)
