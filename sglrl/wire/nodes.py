"""The messages between the driver and the daemons of other machines ("nodes").

A node and a driver have a session, which survives broken connections. The messages of a session
have serial numbers (``core.node_session``). Each of these messages is sent as two frames:
``Numbered`` and the message. All other messages belong to one connection.
"""

from __future__ import annotations

import msgspec

from .processes import Dump, Environment, Exited, Fork, Forked, Kill


class NodeHello(msgspec.Struct, array_like=True, frozen=True, tag=80):
    """The first message of a node on a connection. The driver answers ``Admit`` or ``Refuse``.

    protocol: the node's ``PROTOCOL_VERSION``.
    name: the name of the host, for messages.
    environment: the versions of the node's Python and packages.
    gpus: the GPUs of the host, as entries for ``CUDA_VISIBLE_DEVICES``.
    cores: number of CPU cores of the host.
    orphan_timeout: seconds without a connection after which the node ends the session.
    boot: a text that identifies the machine and its last boot.
    session: the id of the session that the node continues, or "" if it has none.
    received: the serial number of the last message that the node has received in this session.
    question: whether the sender is not a node, and only asks whether a node would be admitted.
    program: the IP address at which the node reaches the driver, or "" if it is unknown.
    process: a text that identifies the process of the node.
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
    """The driver admits a node.

    session: the id of the session. If it is the id in ``NodeHello``, the session continues. If not,
        a new session begins.
    received: the serial number of the last message that the driver has received in the session.
    environment: the versions of the driver's Python and packages, if ``NodeHello`` is a question.
    """

    session: str
    received: int
    environment: Environment | None = None


class Refuse(msgspec.Struct, array_like=True, frozen=True, tag=82):
    """The driver cannot use the node. The node ends with this ``reason``.

    A node that waits for programs also sends this message, if it serves another program.
    """

    reason: str


class Numbered(msgspec.Struct, array_like=True, frozen=True, tag=83):
    """A message of the session follows in the next frame.

    number: the serial number of this message.
    received: the serial number of the last message that the sender has received in the session.
    """

    number: int
    received: int


class Acknowledge(msgspec.Struct, array_like=True, frozen=True, tag=84):
    """All messages up to number ``received`` have arrived. Both sides send this every second."""

    received: int


class Goodbye(msgspec.Struct, array_like=True, frozen=True, tag=85):
    """The sender ends the session, because it exits or no longer needs the other side."""


class Invite(msgspec.Struct, array_like=True, frozen=True, tag=86):
    """Ask a node that waits for programs to connect to the program at ``address``."""

    address: str


OfConnection = NodeHello | Admit | Refuse | Numbered | Acknowledge | Goodbye | Invite


class OpenPool(msgspec.Struct, array_like=True, frozen=True, tag=90):
    """Connect to a fork server for a pool's workers. The node answers ``PoolOpened``.

    Attributes:
        pool: the number of the pool.
        preload: the kind of fork server, see ``driver.fork_server.fork_server``.
        env: the workers' environment variables, in addition to the node's variables.
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
    """The end of the output that a worker has written since the last ``Output``.

    key: the key of the worker's process.
    """

    pool: int
    key: int
    text: str


ToNode = OpenPool | ClosePool | ToPool
FromNode = PoolOpened | FromPool | Output
