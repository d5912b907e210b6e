"""Stop waiting for engines when only an update of all weights could make them serve again."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, Self

from ..errors import WeightsLost

if TYPE_CHECKING:
    from ..client.client import Client

_CHECK_SECONDS: Final = 2.0
"""Seconds between two checks. Weights are lost if all workers are stale in two checks in a row."""


class UnlessWeightsLost:
    """A context manager that raises ``WeightsLost`` when no worker has the current weights.

    The program that waits usually makes the weight updates itself. Without the error, it would wait
    forever.

    Raises:
        WeightsLost: all workers have been "stale" for some seconds.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._lost = False
        self._handle: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._cancelling = task.cancelling()
        self._check(lost_before=False)
        return self

    def _check(self, lost_before: bool) -> None:
        states = {worker.state for worker in self._client.workers} - {"retired"}
        lost = states == {"stale"}
        if lost and lost_before:
            self._lost = True
            self._task.cancel()
            return
        loop = asyncio.get_running_loop()
        self._handle = loop.call_later(_CHECK_SECONDS, self._check, lost)

    async def __aexit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        if self._handle is not None:
            self._handle.cancel()
        if self._lost and self._task.uncancel() <= self._cancelling and kind is not None:
            if not issubclass(kind, asyncio.CancelledError):
                return
            raise WeightsLost(
                f"no process has the weights of version {self._client.weight_version} any more, "
                "so no worker serves; call update_weights with all weights, then go on (no group "
                "is lost)"
            ) from None
