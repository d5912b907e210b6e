"""A protocol for uvicorn that limits the time and the size of a request's head."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES: Final = 64 << 10
"""Maximum size of a request's URL and headers together."""


class LimitedProtocol(HttpToolsProtocol):  # type: ignore[misc]
    """Closes a connection if the head of a request takes too long or is too large.

    This class also limits the time in which a body must arrive that no handler reads. If a handler
    reads the body, ``read_body`` limits the time.

    Args:
        seconds: time limit for the head of a request. It counts from the start of the connection
            for the first request, and from the first byte for later requests. The same limit
            applies again to the time from the end of the head to the end of the request.
    """

    def __init__(self, *args: Any, seconds: float, **options: Any) -> None:
        super().__init__(*args, **options)
        self._seconds = seconds
        self._timer: asyncio.TimerHandle | None = None
        self._in_head = True
        self._received = 0
        """Number of bytes received since the current head began."""
        self._cycles: deque[Any] = deque()
        """Requests without an answer. If the connection is lost, uvicorn notifies only the last."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, error: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(error)
        for cycle in self._cycles:
            cycle.disconnected = not cycle.response_complete
            cycle.message_event.set()
        self._cycles.clear()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._in_head:
            return
        self._received += len(data)
        if self._received > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"The head has more than {MAX_HEAD_BYTES:,} bytes.")

    # --- callbacks of the parser ------------------------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._received = True, 0
        self._start_timer()

    def on_headers_complete(self) -> None:
        self._in_head = False
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > MAX_HEAD_BYTES:
            # The parser catches this error and rejects the request.
            raise ValueError(f"the head has {size:,} bytes")
        self._stop_timer()
        self._start_timer()
        super().on_headers_complete()
        while self._cycles and self._cycles[0].response_complete:
            self._cycles.popleft()
        self._cycles.append(self.cycle)

    def on_message_complete(self) -> None:
        self._stop_timer()
        super().on_message_complete()

    # --- time -------------------------------------------------------------------------------------

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self._seconds, self._late)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        self._timer = None
        if self.cycle is not None and not self.cycle.response_complete:
            # The connection stays open until the client has received the answer.
            self._start_timer()
        else:
            self.transport.close()
