"""The requests of an engine worker, and where they are."""

from __future__ import annotations

import time
from typing import Any

from ...mailbox import Mailbox
from ..speed import TokenRate
from .next_token import NextTokens
from .tracked_request import TrackedRequest


class RequestTable:
    """The requests that the driver has sent, and the totals of those that ended.

    Attributes:
        scheduler: the ``SglrlScheduler``. It is set once the scheduler is built.
        requests: all unfinished requests, by the id of the call.
        incoming: what SGLang receives at the begin of its next turn.
        held_back: what SGLang receives when no command drains any more. See ``Draining``.
        cancelled: ids of requests that the driver has cancelled, and SGLang has received.
        returned: ids of requests that return their tokens so far.
        begun: time of ``time.monotonic`` at which the engine was ready.
        rate: the generated tokens per second, also those of requests that run.
    """

    def __init__(self, mailbox: Mailbox) -> None:
        self.mailbox = mailbox
        self.scheduler: Any
        self.requests: dict[int, TrackedRequest] = {}
        self.incoming: list[Any] = []
        self.held_back: list[Any] = []
        self.cancelled: set[int] = set()
        self.returned: set[int] = set()
        self.next_tokens = NextTokens(mailbox)
        self.begun = time.monotonic()
        self.rate = TokenRate(self.begun)
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generated_tokens = 0
