"""Decode the answers of ranks and senders: a body of the expected type, or an error."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from ..core.weight_update import SENDER, Member
from ..errors import ProtocolError, SglrlError, from_wire
from ..wire.calls import ErrorBody
from ..wire.codec import MALFORMED
from ..wire.weights import RankAnswer

T = TypeVar("T")


def body_of(decoder: msgspec.msgpack.Decoder[T], answer: RankAnswer) -> T:
    """Return the decoded body of an answer.

    Raises:
        ProtocolError: the body does not have the decoder's type.
    """
    try:
        return decoder.decode(answer.body)
    except MALFORMED as error:
        raise ProtocolError(f"a malformed answer to {answer.phase!r}: {error}") from None


def error_of(body: ErrorBody, member: Member | None = None) -> SglrlError:
    """Return the error that an answer reports. Its message names the worker of ``member``."""
    who = f"worker {member[0]}: " if member is not None and member != SENDER else ""
    return from_wire(body.kind, who + body.message, body.traceback)
