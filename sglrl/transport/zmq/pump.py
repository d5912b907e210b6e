"""Receive the messages of a socket on an event loop.

The event loop watches the socket's file descriptor, and messages are received without blocking. The
descriptor is edge-triggered, and *any* operation on the socket may consume its edge. After every
burst of sends, the socket is therefore checked once for messages that arrived in the meantime
(http://api.zeromq.org/4-3:zmq-getsockopt, ZMQ_FD). A receive is never cancelled or timed out, so
no message can be lost between two receivers.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from typing import Any, Final
from weakref import WeakSet, finalize

import zmq

from ..base import OnPause
from .sockets import Context, Socket, close_socket, receive_frames

_BATCH: Final = 128
"""Maximum number of messages handled in one callback before the loop runs other tasks."""
_BATCH_SECONDS: Final = 0.001
"""Maximum seconds of one callback. This is needed, as a message may contain hundreds of answers."""


class Pump:
    """Receives all messages of a socket on the running loop. A subclass handles them.

    Attributes:
        plain_frames: number of frames at the start of a message that are not raw frames.
        on_pause: is called after the last message of a batch.
    """

    plain_frames = 1

    def __init__(self, socket: Socket) -> None:
        self.socket = socket
        self.closed = False
        self.on_pause: OnPause | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._scheduled = False
        _pumps.add(self)

    def begin(self) -> None:
        """Start to receive messages, on the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self.socket.fileno(), self._drain)
        self.check_soon()

    def check_soon(self) -> None:
        """Check for messages at the end of the event loop's tick.

        Call this after every send, which may have consumed the edge that announces a message. The
        sends of one tick share one check.
        """
        if not self._scheduled and self._loop is not None:
            self._scheduled = True
            self._loop.call_soon(self._drain)

    def handle(self, frames: list[Any]) -> None:
        """Process one message."""
        raise NotImplementedError

    def close(self) -> None:
        """Stop receiving and close the socket at once. Closing again has no effect."""
        if self.closed:
            return
        self.closed = True
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self.socket.fileno())
        close_socket(self.socket)

    def _drain(self) -> None:
        self._scheduled = False
        if self.closed:
            return
        socket, plain = self.socket, self.plain_frames
        # If ``handle`` raises an exception, the socket must be checked again, because the edge for
        # the following messages was already consumed.
        more = True
        end = time.monotonic() + _BATCH_SECONDS
        try:
            for _ in range(_BATCH):
                try:
                    frames = receive_frames(socket, plain)
                except zmq.Again:
                    more = False
                    return
                self.handle(frames)
                if self.closed or time.monotonic() > end:
                    return
        finally:
            if more and not self.closed:
                self.check_soon()
            if self.on_pause is not None and not self.closed:
                self.on_pause()


def close_with(pump: Pump, *owned: Socket | Context) -> None:
    """Close sockets and contexts in this order when an unclosed pump is garbage-collected.

    Without this function, the garbage collector may terminate a context before its sockets are
    closed, and then block for ever. At interpreter exit nothing is closed, because an event loop in
    another thread may still use the sockets.
    """
    finalize(pump, _close_in_order, owned, os.getpid()).atexit = False


def _close_in_order(owned: Sequence[Socket | Context], pid: int) -> None:
    # A forked process has copies of the sockets. Only the parent closes them.
    if os.getpid() == pid:
        for one in owned:
            if isinstance(one, zmq.Context):
                one.destroy(0)
            elif not one.closed:
                close_socket(one)


_pumps: Final[WeakSet[Pump]] = WeakSet()


def _leave_alone() -> None:
    """Disable all pumps in a forked process, whose event loop is also a copy.

    The sockets belong to the parent. In the child, every ZeroMQ operation fails with "interrupted".
    """
    for pump in _pumps:
        pump.closed = True


os.register_at_fork(after_in_child=_leave_alone)
