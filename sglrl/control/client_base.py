"""The state that all parts of ``Client`` share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn, Protocol, TypeVar

from ..driver.driver import Driver
from ..driver.port import PoolPort
from ..errors import Closed, UsageError
from ..weights.port import WeightSender
from ..wire.adapters import LoraInfo
from ..wire.processes import PoolEntry
from .operations import Operation
from .snapshot import Observed

_P = TypeVar("_P")


class Closable(Protocol):
    """Something that a client opens, and closes at its end."""

    async def close(self) -> None: ...


class RemoteServer(Closable, Protocol):
    """Serves clients in other processes."""

    address: str
    """The address to pass to ``sglrl.connect``. It contains a secret."""

    @property
    def entry(self) -> PoolEntry:
        """How processes of this machine connect to the pool."""
        ...


class AdapterNames(Protocol):
    """The adapters that calls may name. ``PoolAdapters`` and ``RemoteAdapters`` implement this."""

    @property
    def loaded(self) -> Mapping[str, LoraInfo]:
        """The loaded adapters by name.

        Raises:
            UsageError: another process has launched the pool.
        """
        ...

    @property
    def versions(self) -> Mapping[str, int]:
        """The last version of each adapter that was ever loaded, by name."""
        ...

    def check(self, name: Any) -> str:
        """Return the name of an adapter.

        Raises:
            UnknownAdapter: no adapter of this name is loaded.
        """
        ...

    def route_version(self, name: str, version: int) -> int:
        """Return a number for routing. Calls that cannot share KV cache have different numbers."""
        ...


class Control(Protocol):
    """The interface through which a client controls its pool.

    ``PoolControl`` implements it in the process that launched the pool. In other processes,
    ``remote.client.RemoteControl`` sends the requests to that process.
    """

    @property
    def is_local(self) -> bool:
        """Whether this process has launched the pool."""
        ...

    @property
    def adapters(self) -> AdapterNames: ...

    @property
    def sender(self) -> WeightSender: ...

    async def start(self) -> None:
        """Begin to follow the state of the pool. The pool has already started."""
        ...

    def part(self, kind: type[_P]) -> _P:
        """Return the part of the control with this class.

        Only operations call this. Operations run in the process that launched the pool, and the
        parts exist only there.
        """
        ...

    async def run(
        self, operation: Operation, client: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run an operation of a client in the process that launched the pool."""
        ...


class ClientBase:
    """The state of a client: its pool, and the pool's driver once the client has started."""

    def __init__(self, pool: PoolPort, control: Control, timeout: float | None) -> None:
        self.pool = pool
        """The pool. Other parts of sglrl use it. Users do not need it."""
        self._control = control
        self.timeout = timeout
        """Seconds that a call may take, unless the caller passes a ``timeout``; None: no limit."""
        self._driver: Driver | None = None
        self._server: RemoteServer | None = None
        self.observed = Observed()
        """The rollouts and gateways of this client. Other parts of sglrl use it."""

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
    def is_open(self) -> bool:
        """Whether the client has started, and its pool is not closed."""
        return self._driver is not None and not self._driver.fabric.closed

    @property
    def is_alive(self) -> bool:
        """Whether the client is open and at least one worker serves calls or will serve them."""
        return self.is_open and any(w.state != "retired" for w in self.pool.workers)

    def check_open(self) -> None:
        """Raise ``Closed`` unless the client has started and is open."""
        self._running()

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


def not_started() -> Closed:
    return Closed(
        "the client has not been started; use 'async with sglrl.launch(...)' or "
        "'await sglrl.launch(...)'"
    )
