"""Open sockets with their options, send and receive messages, close sockets, make CURVE keys."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Final

import zmq

from ..base import Frame
from ..system_limits import check_threads

Socket = zmq.Socket[bytes]
Context = zmq.Context[Socket]

_COPIED_OUT: Final = 192 << 10
"""Frames with more bytes are passed to ZeroMQ without a copy. For smaller frames, a copy costs less
than the thread in which pyzmq later releases them."""
_COPIED_IN: Final = 64 << 10
"""Raw frames with at least this many bytes are not copied out of ZeroMQ's own memory."""
# These are plain integers, because a message takes twice as long with pyzmq's enums.
_LAST: Final = int(zmq.NOBLOCK)
_MORE: Final = int(zmq.NOBLOCK) | int(zmq.SNDMORE)
_RCVMORE: Final = int(zmq.RCVMORE)
_THREADS: Final = 3
"""Number of threads that a context and a connection start. ZeroMQ aborts the process if it cannot
start a thread."""


def key_pair() -> tuple[str, str]:
    """Return a new public key and its secret key, in Z85."""
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


def public_key(secret: str) -> str:
    """Return the public key of a secret key, in Z85."""
    return zmq.curve_public(secret.encode()).decode()


def open_socket(
    context: Context,
    kind: int,
    address: str,
    *,
    max_message_bytes: int,
    heartbeat_timeout: float | None,
) -> Socket:
    """Return a new socket with the options for ``address``. It is neither bound nor connected.

    Args:
        heartbeat_timeout: close a TCP connection on which nothing arrives for this number of
            seconds. None: never.
    """
    check_threads(_THREADS)
    socket: Socket = context.socket(kind)
    try:
        socket.setsockopt(zmq.LINGER, 0)
        # The fabric's window limits the pending messages. ZeroMQ's limit would drop messages or
        # block.
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
        socket.setsockopt(zmq.IPV6, "[" in address)
        if heartbeat_timeout is not None and address.startswith("tcp://"):
            _set_heartbeat(socket, heartbeat_timeout)
    except BaseException:
        # An unclosed socket would block the termination of its context for ever, and the caller
        # gets no reference to this socket.
        socket.close(0)
        raise
    return socket


def _set_heartbeat(socket: Socket, timeout: float) -> None:
    milliseconds = ceil(timeout * 1000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, milliseconds)
    socket.setsockopt(zmq.HEARTBEAT_IVL, ceil(milliseconds / 4))
    # A heartbeat is sent after all earlier messages. If these fill the kernel's buffer, ZeroMQ
    # waits for room without a time limit, so TCP_MAXRT sets a time limit in the kernel.
    # HEARTBEAT_TTL is not needed, because both ends send heartbeats. It is also wrong from 65 s on,
    # because libzmq 4.3.5 computes it in 16 bits.
    socket.setsockopt(zmq.TCP_MAXRT, milliseconds)


def send_frames(socket: Socket, frames: Sequence[Frame]) -> None:
    """Send one message.

    Raises:
        zmq.Again: the message would have to wait.
    """
    last = len(frames) - 1
    for i, frame in enumerate(frames):
        socket.send(frame, _MORE if i < last else _LAST, len(frame) <= _COPIED_OUT)


def receive_frames(socket: Socket, plain: int) -> list[Frame]:
    """Receive and return one message.

    The frames after the first ``plain`` frames are raw frames. Large raw frames are views of
    ZeroMQ's own memory, because a copy of half a megabyte takes longer than the rest of the
    processing of the frame.

    Raises:
        zmq.Again: no message has arrived.
    """
    frames: list[Frame] = [socket.recv(_LAST)]
    while socket.getsockopt(_RCVMORE):
        if len(frames) < plain:
            frames.append(socket.recv())
            continue
        frame = socket.recv(copy=False)
        large = len(frame) >= _COPIED_IN
        frames.append(frame.buffer.toreadonly() if large else frame.bytes)
    return frames


def close_socket(socket: Socket, linger: float = 0.0) -> None:
    """Close a socket.

    Args:
        socket: the socket to close.
        linger: maximum seconds in which ZeroMQ sends the messages that are not sent yet.
    """
    # This ends the thread that waits for events, if there is one.
    socket.disable_monitor()
    socket.close(int(linger * 1000))
