"""The messages between the driver and a worker: calls, their results, and heartbeats."""

from __future__ import annotations

from typing import Final

import msgspec

from .engine import EngineInfo

PROTOCOL_VERSION = 15


class CallMessage(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """One call of an endpoint.

    args: the argument struct of the endpoint as msgpack.
    frames: number of raw frames of the message that belong to this call.
    trace: the headers of W3C (``traceparent``, ``tracestate``) of an actor's call, or None.
    """

    id: int
    endpoint: str
    args: msgspec.Raw
    frames: int = 0
    trace: dict[str, str] | None = None


class Submit(msgspec.Struct, array_like=True, gc=False, frozen=True, tag=1):
    """Calls for this worker from one tick of the driver's event loop, or a part of these calls."""

    calls: list[CallMessage]


class Cancel(msgspec.Struct, array_like=True, gc=False, frozen=True, tag=2):
    """Stop these calls. The worker still answers each call once, with CANCELLED or its result."""

    ids: list[int]


class Shutdown(msgspec.Struct, array_like=True, gc=False, frozen=True, tag=3):
    """End the process. The driver has already answered the callers of running calls."""


class ShareRows(msgspec.Struct, array_like=True, gc=False, frozen=True, tag=4):
    """The driver has mapped the memory of ``Ready.rows``. The worker may put rows there."""


ToWorker = Submit | Cancel | Shutdown | ShareRows


class ItemKind:
    """The kinds of ``Item``. All kinds except ``CHUNK`` end the call.

    They are plain integers, because Python 3.11 looks up a member of an ``IntEnum`` more slowly
    than it decodes an item.
    """

    CHUNK: Final = 0
    DONE: Final = 1
    ERROR: Final = 2
    CANCELLED: Final = 3
    FAILED: Final = 4
    """An error of the driver itself (``ErrorBody``). It is only sent to remote clients."""


class Item(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """A part of the answer to one call, or its end.

    kind: one of ``ItemKind``.
    body: msgpack of the endpoint's result type, or of ``ErrorBody`` for ERROR and FAILED.
    frames: number of raw frames of the message that belong to this item.
    """

    id: int
    kind: int
    body: bytes = b"\xc0"
    frames: int = 0


class ErrorBody(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """An error of an endpoint. ``kind`` is the name of its class, ``traceback`` is a text."""

    kind: str
    message: str
    traceback: str = ""


class Load(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """The load of one engine.

    kv_usage: share of the KV cache in use, 0..1, or -1 until the engine reports its load.
    waiting: number of requests that the engine has not begun to compute.
    preempted: number of requests removed from the KV cache since the start of the engine.
    step_seconds: mean duration of the latest steps in seconds, or 0 if it is not known.
    shortest_step: duration of the shortest steps in seconds, or 0 if it is not known.
    request_steps: the sum of the number of requests over all steps of the engine, or 0 if it is not
        known.
    """

    kv_usage: float = -1.0
    waiting: int = 0
    preempted: int = 0
    step_seconds: float = 0.0
    shortest_step: float = 0.0
    request_steps: int = 0


class Results(msgspec.Struct, array_like=True, gc=False, frozen=True, tag=11):
    """All items of one scheduler step, or of one tick of a plain actor's event loop.

    load: the load of the engine, if the worker reports it now.
    slots: the slots of shared memory (``transport/shared_rows.py``) that contain raw frames.
    """

    items: list[Item]
    load: Load | None = None
    slots: list[int] = []


class Starting(msgspec.Struct, array_like=True, gc=False, frozen=True, tag=12):
    """The current stage of a worker's start, which is shown to the user. ``Ready`` follows."""

    stage: str


class RowsOffer(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """Memory that a worker can share with the driver.

    fd: the file descriptor of the memory in the worker.
    row_bytes: bytes of one row.
    token: a random part of the file's name.
    """

    fd: int
    row_bytes: int
    token: str


class Ready(msgspec.Struct, array_like=True, frozen=True, tag=13):
    """The worker accepts calls. The driver sends nothing before this message.

    A worker that returns after its connection broke sends this message again, and then holds no
    calls.

    window: maximum number of calls that the worker accepts at a time.
    """

    protocol: int
    pid: int
    window: int
    endpoints: list[str]
    device: str = "cpu"
    engine: EngineInfo | None = None
    rows: RowsOffer | None = None


ToDriver = Results | Starting | Ready


class Heartbeat(msgspec.Struct, array_like=True, gc=False, frozen=True, tag=50):
    """A message that a thread of every worker sends regularly, on a separate socket.

    progress: a counter that the worker's loop increases.
    phase: the reason why the counter may stay the same, as named in ``core.hangs``, or "".
    """

    progress: int
    phase: str = ""


def heartbeat_identity(worker: bytes) -> bytes:
    """Return the identity of a worker's heartbeat socket at the driver's router."""
    return worker + b"/heartbeat"
