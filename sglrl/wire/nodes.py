"""The daemons of other machines ("nodes"): their messages to the driver, and the driver's answers.

A node and a driver have a session, which survives broken connections. The messages of a session
have numbers (``core.node_session``). They are sent as two frames, ``Numbered`` and the message. All
other messages belong to one connection.
"""

from __future__ import annotations

import msgspec

from .processes import Dump, Environment, Exited, Fork, Forked, Kill


class NodeHello(msgspec.Struct, array_like=True, frozen=True, tag=80):
    """The first message of a node on a connection. The driver answers ``Admit`` or ``Refuse``.

    protocol: the node's ``PROTOCOL_VERSION``.
    name: the name of the host, for messages.
    gpus: entries for ``CUDA_VISIBLE_DEVICES``.
    orphan_timeout: seconds without a connection after which the node ends the session.
    boot: identifies the machine and its start.
    session: the session that the node would like to continue; empty: none.
    received: the number of the last message that it has received in this session.
    question: the sender is no node, and only wants to know the answer.
    program: the IP address at which the node reaches the driver; empty: unknown.
    process: identifies the process of the node.
    """

    protocol: int
    name: str
    environment: Environment
    gpus: tuple[str, ...]
    cores: int
    orphan_timeout: float
    boot: str = ""
    session: str = ""
    received: int = 0
    question: bool = False
    program: str = ""
    process: str = ""


class Admit(msgspec.Struct, array_like=True, frozen=True, tag=81):
    """The session goes on, or a new one begins if ``session`` is not the one of ``NodeHello``.

    received: the number of the last message that the driver has received in it.
    """

    session: str
    received: int
    environment: Environment | None = None


class Refuse(msgspec.Struct, array_like=True, frozen=True, tag=82):
    """The driver cannot use the node. The node ends with this ``reason``.

    From a node that waits for programs: it serves another one.
    """

    reason: str


class Numbered(msgspec.Struct, array_like=True, frozen=True, tag=83):
    """A message of the session follows in the next frame.

    received: acknowledges all messages up to this number.
    """

    number: int
    received: int


class Acknowledge(msgspec.Struct, array_like=True, frozen=True, tag=84):
    """All messages up to the number ``received`` have arrived. Both sides send it every second."""

    received: int


class Goodbye(msgspec.Struct, array_like=True, frozen=True, tag=85):
    """The sender ends the session: it exits, or it does not want the other side any more."""


class Invite(msgspec.Struct, array_like=True, frozen=True, tag=86):
    """To a node that waits for programs: connect to the program that listens at ``address``."""

    address: str


OfConnection = NodeHello | Admit | Refuse | Numbered | Acknowledge | Goodbye | Invite


class OpenPool(msgspec.Struct, array_like=True, frozen=True, tag=90):
    """Connect to a fork server for a pool's workers. The node answers ``PoolOpened``.

    Attributes:
        env: the workers' environment variables, in addition to the node's.
    """

    pool: int
    preload: str
    env: dict[str, str] = {}


class ClosePool(msgspec.Struct, array_like=True, frozen=True, tag=91):
    """Kill the pool's workers and forget the pool."""

    pool: int


class ToPool(msgspec.Struct, array_like=True, frozen=True, tag=92):
    """A message for the pool's fork server."""

    pool: int
    message: Fork | Kill | Dump


class PoolOpened(msgspec.Struct, array_like=True, frozen=True, tag=93):
    """The pool's fork server is ready, or failed with ``error`` and ``output``."""

    pool: int
    error: str = ""
    output: str = ""


class FromPool(msgspec.Struct, array_like=True, frozen=True, tag=94):
    """A message of the pool's fork server."""

    pool: int
    message: Forked | Exited


class Output(msgspec.Struct, array_like=True, frozen=True, tag=95):
    """The end of what a worker has written since the last ``Output``."""

    pool: int
    key: int
    text: str


ToNode = OpenPool | ClosePool | ToPool
FromNode = PoolOpened | FromPool | Output
