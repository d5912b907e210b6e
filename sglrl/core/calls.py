"""The life of one call, and the deadlines of the live calls.

::

    QUEUED ──dispatch──▶ SENT ──first chunk──▶ RUNNING
      ▲ │                 │ │                    │ │
      │ │   worker lost,  │ │                    │ │
      │ └──retry◀─────────┘ │  cancel, deadline  │ │
      │                     ├───▶ CANCELLING ◀───┤ │
      └─────────────────────┼──────────┼─────────┘ │
                            ▼          ▼           ▼
                                     ENDED

Invariants:

* A call ends exactly once, and its caller is notified exactly once.
* A cancelled call keeps its place in the worker's window until the worker confirms, because the
  worker may still compute the call. The caller of a CANCELLING call no longer waits for an answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import Any, Final

import msgspec
from msgspec import Raw

from ..errors import SglrlError
from .clients import ClientState
from .prefixes import Holder, Route

QUEUED: Final = 0
SENT: Final = 1
RUNNING: Final = 2
CANCELLING: Final = 3
ENDED: Final = 4

STATE_NAMES: Final = ("queued", "sent", "running", "cancelling", "ended")

LEGAL: Final[dict[int, tuple[int, ...]]] = {
    QUEUED: (SENT, ENDED),
    SENT: (RUNNING, CANCELLING, QUEUED, ENDED),
    RUNNING: (CANCELLING, QUEUED, ENDED),
    CANCELLING: (ENDED,),
    ENDED: (),
}

_SPARE: Final = 64
"""The heap is cleaned when it has more than ``_SPARE + 2 * live calls`` entries."""


class Call:
    """One call and its state. The shell creates the call and submits it to the fabric.

    Attributes:
        args: a frozen struct of the endpoint's arguments, which is encoded when the call is sent,
            or ``Raw`` arguments that are already encoded.
        reply: an object of the shell for the answer. The core only passes it on with the effects.
        stream: whether the caller receives chunks as they arrive. After its first chunk, such a
            call is not run again from the beginning, because the caller already has this chunk.
        bound_to: the member whose process must execute the call, or None. A bound call is pinned to
            this member, and ends with ``WorkerLost`` instead of running in a replacement, even if
            the call is idempotent.
        resumable: whether another worker can continue from the chunks received so far.
        losses: number of workers that were lost while they held the call. A worker that is away
            does not count. For a resumable call, the first chunk from each worker resets the number
            to 0.
        urgent: whether to send the call at once to the READY worker to which it is pinned, even if
            the worker's window is full. The calls that the worker holds may depend on this call.
        target: for a call through a remote pool: the index of the worker in that pool to which the
            call is pinned. None: the call is not pinned there.
        client: the client that made the call. It is None for a call of the pool's own client until
            the call waits.
        trace: the headers of W3C for the trace that a call of an actor belongs to, or None.
        answer_bytes: size of the answer, if it is known in advance and the client has to read the
            answer; otherwise 0.
        extra_bytes: bytes of the call other than its prompt, raw frames and ``Raw`` arguments.
        queued_bytes: bytes that the waiting call adds to ``CallQueue.queued_bytes``, without its
            prompt.
        passed: number of calls that were sent before this call although they are later in order.
    """

    __slots__ = (
        "answer_bytes",
        "args",
        "attempts",
        "bound_to",
        "client",
        "deadline",
        "endpoint",
        "extra_bytes",
        "first_at",
        "frames",
        "id",
        "idempotent",
        "losses",
        "passed",
        "pinned",
        "priority",
        "queued_bytes",
        "reply",
        "resumable",
        "route",
        "sent_at",
        "state",
        "stream",
        "submitted_at",
        "target",
        "trace",
        "urgent",
        "worker",
    )

    def __init__(
        self,
        endpoint: str,
        args: msgspec.Struct | Raw,
        reply: Any,
        frames: Sequence[Any] = (),
        deadline: float | None = None,
        priority: int = 0,
        pinned: int | None = None,
        route: Route | None = None,
        idempotent: bool = False,
        stream: bool = False,
        resumable: bool = False,
        urgent: bool = False,
        client: ClientState | None = None,
    ) -> None:
        self.id = -1
        self.endpoint = endpoint
        self.args = args
        self.frames = frames
        self.reply = reply
        self.deadline = deadline
        self.priority = priority
        self.pinned = pinned
        self.bound_to: Holder | None = None
        self.target: int | None = None
        self.trace: Mapping[str, str] | None = None
        self.route = route
        self.idempotent = idempotent
        self.stream = stream
        self.resumable = resumable
        self.urgent = urgent
        self.client = client
        self.answer_bytes = 0
        self.extra_bytes = 0
        self.queued_bytes = 0
        self.passed = 0
        self.losses = 0
        self.state = QUEUED
        self.worker: Holder | None = None
        self.attempts = 0
        self.submitted_at = 0.0
        self.sent_at = 0.0
        self.first_at = 0.0

    def move(self, state: int) -> None:
        """Change the state.

        Raises:
            SglrlError: ``LEGAL`` does not allow the change. This is a bug of the core.
        """
        if state not in LEGAL[self.state]:
            raise SglrlError(
                f"{self!r}: {STATE_NAMES[self.state]} -> {STATE_NAMES[state]} is not legal"
            )
        self.state = state

    def goes_before(self, other: Call) -> bool:
        """Return True if this call is served before the other.

        The higher priority is served first. Within one priority clients take turns: the client that
        was served longest ago is first. Within one client the older call, with the lower id, is
        first.
        """
        if self.priority != other.priority:
            return self.priority > other.priority
        mine, its = self.client, other.client
        if mine is not its and mine is not None and its is not None:
            return mine.turn < its.turn
        return self.id < other.id

    def __repr__(self) -> str:
        worker = self.worker.index if self.worker is not None else None
        return (
            f"<Call {self.id} {self.endpoint} {STATE_NAMES[self.state]} worker={worker} "
            f"attempts={self.attempts} submitted={self.submitted_at:.6f} sent={self.sent_at:.6f} "
            f"first={self.first_at:.6f} deadline={self.deadline}>"
        )


class Deadlines:
    """The deadlines of live calls. The entry of an ended call may remain for some time.

    Args:
        calls: the live calls by id. The caller adds and removes calls.
    """

    def __init__(self, calls: dict[int, Call]) -> None:
        self._calls = calls
        self._heap: list[tuple[float, int]] = []

    def __len__(self) -> int:
        """Return the number of entries, including those of ended calls."""
        return len(self._heap)

    def add(self, id_: int, deadline: float) -> None:
        heappush(self._heap, (deadline, id_))
        if len(self._heap) > _SPARE + 2 * len(self._calls):
            self._heap = [entry for entry in self._heap if entry[1] in self._calls]
            heapify(self._heap)

    def next(self) -> float | None:
        """Return the earliest deadline of a live call, or None if no live call has a deadline."""
        heap = self._heap
        while heap and heap[0][1] not in self._calls:
            heappop(heap)
        return heap[0][0] if heap else None

    def pop(self, now: float) -> Call | None:
        """Remove and return a live call whose deadline has passed, if any."""
        heap = self._heap
        while heap and heap[0][0] <= now:
            call = self._calls.get(heappop(heap)[1])
            if call is not None:
                return call
        return None
