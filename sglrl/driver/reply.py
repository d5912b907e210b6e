"""The interface of a call's reply."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..core.calls import Call
from ..errors import SglrlError
from ..wire.calls import Item
from ..wire.codec import Buffer


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
