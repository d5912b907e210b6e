"""Effects: the fabric asks the driver to send, restart or end calls.

Methods of ``Fabric`` append effects to its ``outbox``. ``RemoteDriver`` appends ``Restart`` for
calls that the pool has restarted.
"""

from __future__ import annotations

import msgspec

from ..errors import SglrlError
from ..wire.calls import Item
from .calls import Call
from .members import Member


class Send(msgspec.Struct, frozen=True, gc=False):
    """Send the call to the worker in the next ``Submit``."""

    member: Member
    call: Call


class SendCancel(msgspec.Struct, frozen=True, gc=False):
    """Send the call's id to the worker in the next ``Cancel``, which stops the call there."""

    member: Member
    id: int


class Chunk(msgspec.Struct, frozen=True, gc=False):
    """Pass a part of the answer to the caller."""

    call: Call
    item: Item


class End(msgspec.Struct, frozen=True, gc=False):
    """Pass the answer or the error to the caller. A call has exactly one end."""

    call: Call
    outcome: Item | SglrlError


class Restart(msgspec.Struct, frozen=True, gc=False):
    """The call lost its worker and runs again.

    A resumable call continues after the chunks received so far. For any other call, the caller
    discards these chunks.
    """

    call: Call


class Drained(msgspec.Struct, frozen=True, gc=False):
    """The worker accepts no calls and holds none."""

    member: Member


class Waiting(msgspec.Struct, frozen=True, gc=False):
    """Calls have waited for some seconds. Log the reason."""

    reason: str


Effect = Send | SendCancel | Chunk | End | Restart | Drained | Waiting
