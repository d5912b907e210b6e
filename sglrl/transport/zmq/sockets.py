"""Socket options, sending, receiving and closing; CURVE keys."""

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
"""Larger frames are passed to ZeroMQ without a copy. For smaller frames, the thread in which pyzmq
releases them costs more than a copy."""
_COPIED_IN: Final = 64 << 10
"""Raw frames of at least this many bytes are read from ZeroMQ's own memory."""
# Use plain integers: with pyzmq's enums a message takes twice as long.
_LAST: Final = int(zmq.NOBLOCK)
_MORE: Final = int(zmq.NOBLOCK) | int(zmq.SNDMORE)
_RCVMORE: Final = int(zmq.RCVMORE)
_THREADS: Final = 3
"""Threads that a context and a connection start. ZeroMQ aborts the process when it cannot start a
thread."""


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
        # The fabric's window limits the pending messages. A high-water mark would drop or block.
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
        socket.setsockopt(zmq.IPV6, "[" in address)
        if heartbeat_timeout is not None and address.startswith("tcp://"):
            _set_heartbeat(socket, heartbeat_timeout)
    except BaseException:
        # A socket that is not closed would block the termination of its context for ever. The
        # caller has no reference to this socket.
        socket.close(0)
        raise
    return socket


def _set_heartbeat(socket: Socket, timeout: float) -> None:
    milliseconds = ceil(timeout * 1000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, milliseconds)
    socket.setsockopt(zmq.HEARTBEAT_IVL, ceil(milliseconds / 4))
    # A heartbeat is sent after all earlier messages. If these fill the kernel's buffer, ZeroMQ
    # waits for room without a time limit; this sets the kernel's time limit. (HEARTBEAT_TTL is not
    # needed, because both ends send heartbeats. libzmq 4.3.5 computes it in 16 bits: it is wrong
    # from 65 s on.)
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
    """Return one message.

    Large raw frames, which follow the first ``plain`` frames, are views of ZeroMQ's own memory. A
    copy of half a megabyte takes longer than the rest of the processing of the frame.

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
        linger: seconds to send the messages that are not sent yet.
    """
    # This ends the thread that waits for events, if any.
    socket.disable_monitor()
    socket.close(int(linger * 1000))
