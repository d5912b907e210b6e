"""The state that all methods of ``Client`` share."""

from __future__ import annotations

from ..driver.driver import Driver
from ..driver.port import PoolPort
from ..errors import Closed
from .requests import Requests


class ClientBase:
    """A pool, and its driver and ``Requests`` once the client has started."""

    def __init__(self, pool: PoolPort) -> None:
        self._pool = pool
        self._driver: Driver | None = None
        self._requests: Requests | None = None

    def _running(self, *, urgent: bool = False) -> Driver:
        """Return the driver.

        Raises:
            Closed: the client has not started, or is closed. With ``urgent``, a client that drains
                still counts as open.
        """
        if self._driver is None:
            raise not_started()
        self._driver.fabric.check_open(urgent=urgent)
        return self._driver

    def _started(self) -> Requests:
        """Return the requests. Raise ``Closed`` if the client has not started."""
        if self._requests is None:
            raise not_started()
        return self._requests


def not_started() -> Closed:
    return Closed(
        "the client has not been started; use 'async with sglrl.launch(...)' or "
        "'await sglrl.launch(...)'"
    )
