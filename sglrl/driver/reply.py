"""The interface of a call's reply, and the end of a call whose reply is broken."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

from ..core.calls import Call
from ..errors import SglrlError
from ..wire.calls import Item
from ..wire.codec import Buffer

logger = logging.getLogger("sglrl.driver")


class Reply(Protocol):
    """Receives the events of one call, on the event loop.

    A method must not block. An exception that it raises fails the call.
    """

    def chunk(self, item: Item, frames: Sequence[Buffer]) -> None:
        """A part of the answer."""

    def end(self, call: Call, outcome: Item | SglrlError, frames: Sequence[Buffer]) -> None:
        """The answer, or the error. Called exactly once, last."""

    def restart(self, call: Call) -> None:
        """The call starts again on another worker.

        Forget the chunks. For a resumable call, put the tokens received so far into ``call.args``.
        """


def fail(call: Call, error: Exception) -> None:
    """Fail only the call whose reply raised an error, which is a bug."""
    logger.error("the answer to %s could not be processed", call.endpoint, exc_info=error)
    failure = SglrlError(
        f"the answer to {call.endpoint} could not be processed: {type(error).__name__}: {error}"
    )
    failure.__cause__ = error
    try:
        call.reply.end(call, failure, ())
    except Exception:
        logger.exception("the caller of %s could not be told", call.endpoint)
