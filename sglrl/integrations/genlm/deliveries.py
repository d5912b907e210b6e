"""Deliver the results of queries: resolve the futures of callers on their own event loops."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, NamedTuple, TypeAlias

import torch

from ...errors import SglrlError

Outcome: TypeAlias = torch.Tensor | SglrlError | None
"""The result of a query, its error, or None for a cancelled query."""

_AT_ONCE = 32
"""The maximum number of futures that are resolved in one iteration of an event loop. So other tasks
of the loop are not delayed for long."""


class Waiter(NamedTuple):
    """A caller's future and its loop. The loop is None for a ``concurrent.futures.Future``."""

    loop: asyncio.AbstractEventLoop | None
    future: Any


class Deliveries:
    """Resolves futures in batches, on any number of event loops."""

    def __init__(self, engine_loop: asyncio.AbstractEventLoop) -> None:
        self._engine_loop = engine_loop
        self._ready: dict[asyncio.AbstractEventLoop, list[tuple[Any, Outcome]]] = {}
        """For each loop, the futures and outcomes of the engine loop's current tick."""
        self._arrived: dict[asyncio.AbstractEventLoop, deque[tuple[Any, Outcome]]] = {}
        """For each loop, the futures and outcomes that wait for its next iterations. Only the
        thread of a loop uses the entry of the loop."""

    def add(self, waiter: Waiter, outcome: Outcome) -> None:
        """Deliver an outcome together with the others of this tick. Runs on the engine's loop."""
        loop, future = waiter
        if loop is None:
            _resolve(future, outcome)
        elif loop in self._ready:
            self._ready[loop].append((future, outcome))
        else:
            self._ready[loop] = [(future, outcome)]
            if len(self._ready) == 1:
                self._engine_loop.call_soon(self._send_ready)

    def _send_ready(self) -> None:
        ready, self._ready = self._ready, {}
        for loop, outcomes in ready.items():
            if loop is self._engine_loop:
                self.arrive(loop, outcomes)
            else:
                self.send(loop, outcomes)

    def send(self, loop: asyncio.AbstractEventLoop, outcomes: list[tuple[Any, Outcome]]) -> None:
        """Resolve futures of ``loop``. Runs on any thread."""
        try:
            loop.call_soon_threadsafe(self.arrive, loop, outcomes)
        except RuntimeError:
            # The loop is closed, so no task waits there.
            self._arrived.pop(loop, None)

    def arrive(self, loop: asyncio.AbstractEventLoop, outcomes: list[tuple[Any, Outcome]]) -> None:
        """Resolve futures of ``loop`` in its next iterations. Runs on ``loop``."""
        arrived = self._arrived.get(loop)
        if arrived is None:
            arrived = self._arrived[loop] = deque()
            # Do not call `_wake` directly, because it may have run in this iteration already.
            loop.call_soon(self._wake, loop)
        arrived.extend(outcomes)

    def _wake(self, loop: asyncio.AbstractEventLoop) -> None:
        arrived = self._arrived[loop]
        for _ in range(min(len(arrived), _AT_ONCE)):
            _resolve(*arrived.popleft())
        if arrived:
            loop.call_soon(self._wake, loop)
        else:
            del self._arrived[loop]


def _resolve(future: Any, outcome: Outcome) -> None:
    if future.done():
        # The caller was cancelled.
        return
    if outcome is None:
        future.cancel()
    elif isinstance(outcome, torch.Tensor):
        future.set_result(outcome)
    else:
        future.set_exception(outcome)
