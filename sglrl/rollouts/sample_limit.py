"""Limit the number of samples that run at a time, and adapt the limit to the engines' load."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from ..core.concurrency import Concurrency
from ..core.driver_listener import DriverListener
from ..core.rollout_plan import Plan

if TYPE_CHECKING:
    from ..client.client import Client

_POLL_SECONDS: Final = 0.05
"""Minimum interval between two polls of the engines' load."""


class SampleLimit(DriverListener):
    """The maximum number of samples that run at a time.

    The maximum is fixed, or follows the load of the engines (``core/concurrency.py``).

    Args:
        fixed: the fixed maximum, or None to follow the load.
        on_change: called when the maximum has changed.
    """

    def __init__(
        self, client: Client, plan: Plan, fixed: int | None, on_change: Callable[[], None]
    ) -> None:
        self._client = client
        self._plan = plan
        self._fixed = fixed
        self._found = Concurrency(max(plan.group_size, 4 * len(client.workers)))
        self._on_change = on_change
        self._polled_at = 0.0

    @property
    def value(self) -> int:
        return self._found.limit if self._fixed is None else self._fixed

    def begin(self) -> None:
        """Start to follow the load of the engines, unless the maximum is fixed."""
        if self._fixed is None:
            self._client.check_open()
            self._client.requests.driver.add_listener(self)

    def end(self) -> None:
        if self._fixed is None and self._client.is_open:
            self._client.requests.driver.remove_listener(self)

    def on_loads(self) -> None:
        now = time.monotonic()
        if now - self._polled_at >= _POLL_SECONDS:
            self._polled_at = now
            loads, queued = self._client.pool.loads()
            if self._found.observe_load(now, self._plan.running, queued, loads):
                self._on_change()
