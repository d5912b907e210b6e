"""The table of an engine worker's unfinished requests."""

from __future__ import annotations

import time
from typing import Any

from ...mailbox import Mailbox
from ..speed import TokenRate
from .next_token import NextTokens
from .tracked_request import TrackedRequest


class RequestTable:
    """The unfinished requests of the driver, and the totals of the finished requests.

    Attributes:
        scheduler: the ``SglrlScheduler``, set once the scheduler is built.
        requests: all unfinished requests, by the id of the call.
        incoming: requests and commands that SGLang receives at its next turn.
        held_back: requests that SGLang receives when no command drains any more. See ``Draining``.
        cancelled: ids of requests that the driver has cancelled and that SGLang has received.
        returned: ids of requests that were aborted and return their tokens so far.
        begun: the time of ``time.monotonic`` at which the engine was ready.
        rate: the generated tokens per second, including tokens of running requests.
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
