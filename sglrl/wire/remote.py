"""A client in another process: its requests to the driver, and the driver's answers."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from .calls import Cancel, Item, Load
from .engine import EngineInfo


class Hello(msgspec.Struct, array_like=True, frozen=True, tag=60):
    """The first message of a client; the driver answers ``Welcome`` or ``Rejected``.

    ``max_message_bytes``: the largest frame that the client accepts.
    """

    protocol: int
    max_message_bytes: int = 256 << 20


class Request(NamedTuple):
    """One call of an engine, or of an operation on the pool.

    A tuple, because it is faster to decode than a struct; a new field needs a new
    ``PROTOCOL_VERSION``.

    args: the arguments, as in ``CallMessage``.
    timeout: seconds left for the call, or None.
    conversation: the client's number of the conversation that the call continues; -1: none.
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
    """All calls that the client submitted in one tick of its loop. ``Cancel`` cancels calls."""

    requests: list[Request]


class Leave(msgspec.Struct, array_like=True, frozen=True, tag=62):
    """The client is closed."""


class BytesRead(msgspec.Struct, array_like=True, gc=False, frozen=True, tag=66):
    """The size of all frames that the client has read since it connected.

    The driver does not start more calls of a client while too many bytes are unread.
    """

    bytes: int


FromClient = Hello | Requests | Cancel | Leave | BytesRead


class WorkerStatus(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """One worker: the fields of ``driver.worker_info.WorkerInfo``, and its reported load."""

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
    queued, queued_bytes: calls that wait at the driver, and the bytes that they hold.
    queued_clients: how many clients these calls come from.
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

    max_message_bytes: the largest call that the driver accepts.
    max_queue: calls of all clients that may wait at the driver.
    """

    protocol: int
    max_message_bytes: int
    weights_address: str
    engine: EngineInfo
    status: PoolStatus
    max_queue: int = 100_000


class Answer(Item, array_like=True, gc=False, frozen=True):
    """An item of one of the client's calls. The last item of a call says how the call went.

    worker: the last worker of the call; -1: none.
    attempts: how many workers the call was sent to.
    queued: seconds until the call was sent to its last worker.
    first: seconds until the first item of that worker arrived; 0: none arrived.
    """

    worker: int = -1
    attempts: int = 0
    queued: float = 0.0
    first: float = 0.0


class Answers(msgspec.Struct, array_like=True, gc=False, frozen=True, tag=64):
    """Items of the client's calls.

    ``again``: calls that started again on another worker before any of these items was sent.
    """

    items: list[Answer]
    again: list[int]
    status: PoolStatus | None = None


class Rejected(msgspec.Struct, array_like=True, frozen=True, tag=65):
    """The driver does not know the client, or knows it no longer. All of its calls are lost."""

    reason: str


ToClient = Welcome | Answers | Rejected
