"""The state that all methods of ``Client`` share."""

from __future__ import annotations

from typing import NoReturn, Protocol

from ..driver.driver import Driver
from ..driver.port import PoolPort
from ..errors import Closed, UsageError
from ..wire.processes import ClientKeys
from .requests import Requests


class RemoteServer(Protocol):
    """Serves clients in other processes."""

    address: str
    """The address to pass to ``sglrl.connect``. It contains a secret."""

    @property
    def way_in(self) -> tuple[str, ClientKeys | None, bool, float | None]:
        """The arguments of ``sglrl.connect`` for processes of this machine.

        Returns:
            ``(address, keys, insecure, heartbeat_timeout)``.
        """
        ...

    async def close(self) -> None: ...


class ClientBase:
    """A pool, and its driver and ``Requests`` once the client has started."""

    def __init__(self, pool: PoolPort) -> None:
        self._pool = pool
        self._driver: Driver | None = None
        self._requests: Requests | None = None
        self._server: RemoteServer | None = None

    def __enter__(self) -> NoReturn:
        raise UsageError(
            "use 'async with', or 'with sglrl.blocking(...)' where there is no asyncio"
        )

    def __exit__(self, *exc: object) -> None: ...

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "a client stays in the process that made it and cannot be pickled or copied; give the "
            "other process client.address, and call sglrl.connect(address) there"
        )

    @property
    def _way_in(self) -> tuple[str, ClientKeys | None, bool, float | None]:
        """See ``RemoteServer``."""
        if self._server is None:
            raise not_started()
        self._running()
        return self._server.way_in

    @property
    def _is_connected(self) -> bool:
        return self._driver is not None and not self._driver.fabric.closed

    @property
    def _is_alive(self) -> bool:
        """Whether the client is open and a worker serves or will serve."""
        return self._is_connected and any(w.state != "retired" for w in self._pool.workers)

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
