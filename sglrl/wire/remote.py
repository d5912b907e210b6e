"""The messages between the driver and a client in another process."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from .calls import Cancel, Item, Load
from .engine import EngineInfo


class Hello(msgspec.Struct, array_like=True, frozen=True, tag=60):
    """The first message of a client. The driver answers ``Welcome`` or ``Rejected``.

    protocol: the client's ``PROTOCOL_VERSION``.
    max_message_bytes: the size of the largest frame that the client accepts.
    """

    protocol: int
    max_message_bytes: int = 256 << 20


class Request(NamedTuple):
    """One call of an engine's endpoint, or of an operation on the pool.

    This is a tuple, because a tuple is faster to decode than a struct. A new field needs a new
    ``PROTOCOL_VERSION``.

    args: the arguments, as in ``CallMessage``.
    timeout: seconds left for the call. None: no limit.
    worker: the index of the worker that must execute the call, or None.
    session: the name of the session of which the call is a turn, or None.
    conversation: the client's number of the conversation that the call continues, or -1.
    """

    id: int
    endpoint: str
    args: msgspec.Raw
    timeout: float | None = None
    priority: int = 0
    worker: int | None = None
    session: str | None = None
    conversation: int = -1


class Requests(msgspec.Struct, array_like=True, gc=False, frozen=True, tag=61):
    """All calls that the client submitted in one tick of its event loop."""

    requests: list[Request]


class Leave(msgspec.Struct, array_like=True, frozen=True, tag=62):
    """The client is closed."""


class BytesRead(msgspec.Struct, array_like=True, gc=False, frozen=True, tag=66):
    """The total bytes of all frames that the client has read since it connected.

    While too many bytes are unread, the driver does not start more calls of the client.
    """

    bytes: int


FromClient = Hello | Requests | Cancel | Leave | BytesRead


class WorkerStatus(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """One worker, with the fields of ``driver.worker_info.WorkerInfo`` and its engine's load."""

    id: int
    pid: int
    state: str
    weight_version: int
    device: str
    load: int
    window: int
    reported: Load
    host: str = ""
    kept_bytes: int = 0


class PoolStatus(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """The state of the pool.

    version: the version of the weights.
    queued, queued_bytes: number of calls that wait at the driver, and their bytes.
    queued_clients: number of clients that have waiting calls.
    lora_versions: the version of each adapter that was ever loaded, by name.
    """

    version: int
    queued: int
    workers: list[WorkerStatus]
    queued_bytes: int = 0
    queued_clients: int = 0
    lora_versions: dict[str, int] = {}


class Welcome(msgspec.Struct, array_like=True, frozen=True, tag=63):
    """The driver accepts the client.

    protocol: the driver's ``PROTOCOL_VERSION``.
    max_message_bytes: the size of the largest call that the driver accepts.
    weights_address: the address to which a sender of weights connects.
    max_queue: maximum number of calls of all clients that wait at the driver.
    """

    protocol: int
    max_message_bytes: int
    weights_address: str
    engine: EngineInfo
    status: PoolStatus
    max_queue: int = 100_000


class Answer(Item, array_like=True, gc=False, frozen=True):
    """An item of one of the client's calls. Only the last item of a call sets these fields.

    worker: the index of the last worker of the call, or -1 if it was sent to none.
    attempts: number of times that the call was sent to a worker.
    queued: seconds until the call was sent to its last worker.
    first: seconds until the first item of this worker arrived, or 0 if none arrived.
    """

    worker: int = -1
    attempts: int = 0
    queued: float = 0.0
    first: float = 0.0


class Answers(msgspec.Struct, array_like=True, gc=False, frozen=True, tag=64):
    """Items of the client's calls.

    again: ids of calls that started again on another worker, before any of these items was sent.
    status: the state of the pool, if the driver reports it now.
    """

    items: list[Answer]
    again: list[int]
    status: PoolStatus | None = None


class Rejected(msgspec.Struct, array_like=True, frozen=True, tag=65):
    """The driver does not admit the client, or has dropped it. All calls of the client are lost."""

    reason: str


ToClient = Welcome | Answers | Rejected
