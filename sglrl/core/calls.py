"""The life of one call.

::

    QUEUED ──dispatch──▶ SENT ──first chunk──▶ RUNNING
      ▲ │                 │ │                    │ │
      │ │   worker lost,  │ │                    │ │
      │ └──retry◀─────────┘ │  cancel, deadline  │ │
      │                     ├───▶ CANCELLING ◀───┤ │
      └─────────────────────┼──────────┼─────────┘ │
                            ▼          ▼           ▼
                                     ENDED

Invariants: a call ends exactly once, and its caller hears of it exactly once. A cancelled call
keeps its place in the worker's window until the worker confirms, because the worker may still be
computing it: the caller of a CANCELLING call has been answered, the reservation has not been
released.
"""

from __future__ import annotations

from collections.abc import Sequence
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


class Call:
    """One call and where it stands. Created by the shell, owned by the fabric once submitted.

    ``args``: a frozen struct of the endpoint's arguments, which is encoded when the call is sent,
    or ``Raw`` that was encoded before. ``reply`` is opaque to the core: it comes back in the
    effects. ``stream`` means that chunks are handed to the caller as they come, so a call that has
    begun cannot be repeated from the start unnoticed. ``resumable``: another worker can go on from
    the chunks received so far. ``losses``: workers lost while they held it, since it last received
    a chunk. ``urgent``: it is sent at once to the READY worker that it is pinned to, whose window
    may be full: it is about the calls that the worker holds. ``target``: in a process that has no
    pool of its own, the worker of the pool that it is for. ``client``: who made it; None until it
    waits, if the pool's own client did. ``answer_bytes``: size of the answer, if it is known before
    and the client has to read it; 0 otherwise. ``extra_bytes``: bytes that it holds beside
    its prompt, its raw frames and ``Raw`` arguments. ``queued_bytes``: bytes that count while
    it waits, beside its prompt. ``passed``: how often a call that comes after it went before it.
    """

    __slots__ = (
        "answer_bytes",
        "args",
        "attempts",
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
        self.target: int | None = None
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
        """Change state. ``SglrlError``, which is a bug of the core, when the table above does not
        allow it."""
        if state not in LEGAL[self.state]:
            raise SglrlError(
                f"{self!r}: {STATE_NAMES[self.state]} -> {STATE_NAMES[state]} is not legal"
            )
        self.state = state

    def goes_before(self, other: Call) -> bool:
        """By priority. Then clients take turns: the one that was served longest ago goes first.
        Calls of one client go by age: ids count submissions."""
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
