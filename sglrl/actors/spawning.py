"""``spawn``: plain actors in worker processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NoReturn, Self

from ..config import (
    FabricConfig,
    PoolConfig,
    check_env,
    check_restarts,
    check_target,
    positive,
    strategies,
)
from ..driver.pool import Birth, Pool, WorkerInfo, describe
from ..errors import UsageError
from ..wire.processes import ActorSpec
from .actor import (
    Actor,
    BroadcastNamespace,
    EndpointSpec,
    StreamNamespace,
    UnaryCaller,
    WorkerHandle,
    constructor_arguments,
    endpoints_of,
)
from .class_pickling import by_value, importable_as


class ActorHandle:
    """A running pool of one actor class.

    ``await handle.method(...)`` goes to the least loaded worker; ``handle.stream.method(...)`` is
    an async iterator; ``await handle.broadcast.method(...)`` asks all; ``handle[i]`` is worker i,
    and ``for worker in handle`` goes through them.
    Every call takes ``timeout=`` in seconds beside the endpoint's own arguments.
    """

    def __init__(self, cls: type[Actor], pool: Pool, birth: Birth) -> None:
        self._cls = cls
        self._birth = birth
        self._specs: dict[str, EndpointSpec] = endpoints_of(cls)
        self._pool = pool

    async def __aenter__(self) -> Self:
        await self._pool.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._pool.close()

    def __enter__(self) -> NoReturn:
        raise UsageError("use 'async with': actors are called with 'await'")

    def __exit__(self, *exc: object) -> None: ...

    def __repr__(self) -> str:
        return f"<ActorHandle of {self._cls.__qualname__}, {describe(self._pool.workers)}>"

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "an actor handle stays in the process that made it and cannot be pickled or copied; "
            "call the actors from there, or spawn some in the other process"
        )

    async def close(self, *, drain: bool = False, timeout: float = 600.0) -> None:
        """End every call and every worker; safe to call again. ``drain``: first wait, at most
        ``timeout`` seconds, for the calls that there are."""
        await self._pool.close(drain=drain, timeout=timeout)

    async def add_workers(self, n: int = 1) -> list[int]:
        """Start ``n`` more; returns their indices when they serve. ``WorkerStartError`` if one
        fails: then none of them is left."""
        return await self._pool.add([self._birth] * positive("n", n))

    async def wait_until_full(self, timeout: float | None = 60.0) -> None:
        """Wait until all workers serve that have not been removed or retired: after a loss, until
        the replacement does. ``DeadlineExceeded`` after ``timeout`` seconds."""
        await self._pool.full(timeout)

    async def remove_worker(self, index: int, *, timeout: float | None = 600.0) -> None:
        """Let worker ``index`` finish what it has, then end it. What it has not finished after
        ``timeout`` seconds ends as when a worker is lost."""
        await self._pool.remove(index, timeout)

    @property
    def workers(self) -> list[WorkerInfo]:
        """The pool's workers, in order; those that are retired too."""
        return self._pool.workers

    @property
    def stream(self) -> StreamNamespace:
        return StreamNamespace(self._pool.driver, self._specs, self._cls.__name__)

    @property
    def broadcast(self) -> BroadcastNamespace:
        return BroadcastNamespace(self._pool.driver, self._specs, self._cls.__name__)

    def __getitem__(self, index: int) -> WorkerHandle:
        _, index, _ = check_target(0, index, None)  # type: ignore[assignment]
        if index is None or not 0 <= index < len(self._pool.workers):
            raise UsageError(f"there is no worker {index}; this pool has {len(self._pool.workers)}")
        return WorkerHandle(self._pool.driver, self._specs, self._cls.__name__, index)

    def __iter__(self) -> Iterator[WorkerHandle]:
        """Every worker's handle, in order."""
        return (self[index] for index in range(len(self)))

    def __len__(self) -> int:
        return len(self._pool.workers)

    def __getattr__(self, name: str) -> UnaryCaller:
        if name.startswith("_"):
            raise AttributeError(name)
        caller = getattr(
            WorkerHandle(self._pool.driver, self._specs, self._cls.__name__, None), name
        )
        # The next access finds it without coming here.
        self.__dict__[name] = caller
        return caller  # type: ignore[no-any-return]

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self._specs})


def spawn(
    actor: type[Actor],
    /,
    *args: Any,
    replicas: int = 1,
    env: Mapping[str, str] | None = None,
    window: int = 64,
    routing: tuple[str, ...] | list[str] | str = ("requests",),
    max_queue: int = 100_000,
    max_queue_bytes: int = 1 << 30,
    start_timeout: float = 60.0,
    hang_timeout: float | None = None,
    restarts: int = 5,
    restart_period: float = 60.0,
    **kwargs: Any,
) -> ActorHandle:
    """Run an actor class in worker processes: ``async with sglrl.spawn(Judge, ...) as judges``.

    Entering raises this process's soft limit of open files to its hard limit, at most to 65,536.

    Args:
        actor: a subclass of ``sglrl.Actor``. Defined in a module, it is imported there by name;
            defined in ``__main__`` or in a function, it travels by value. The user's script is
            never run again.
        args, kwargs: for its ``__init__``, typed by the annotations.
        replicas: worker processes.
        env: environment variables of the workers, beside the driver's own.
        window: calls one worker works on at a time; the rest wait at the driver.
        routing: see ``sglrl.core.routing``.
        max_queue: calls that may wait at the driver before ``Overloaded`` is raised.
        max_queue_bytes: bytes that the arguments of these calls may have before ``Overloaded`` is
            raised.
        start_timeout: seconds until all workers must be ready.
        hang_timeout: a worker whose event loop does not turn over for so many seconds, though it
            holds calls, is ended as if it had died, and the stacks of its threads are logged. An
            endpoint may await as long as it likes; one that computes must do so in a thread. None:
            never.
        restarts: a worker that is lost is replaced by a new one, made with the same arguments, at
            most so often within ``restart_period`` seconds; then the pool goes on without it. 0:
            never.

    Raises:
        UsageError: the class declares no endpoint, or an argument has the wrong type.
        WorkerStartError: on entering, when ``__init__`` raises in the worker.
    """
    if not (isinstance(actor, type) and issubclass(actor, Actor)):
        raise UsageError(f"spawn takes a subclass of sglrl.Actor, got {actor!r}")
    if not endpoints_of(actor):
        raise UsageError(
            f"{actor.__name__} declares no endpoint; mark its methods with @sglrl.endpoint"
        )
    positive("replicas", replicas)
    positive("window", window)
    body, frames = constructor_arguments(actor).encode(args, kwargs)
    target = importable_as(actor)
    spec = ActorSpec(
        target=target,
        # Only between this process and its own fork server, over their private socket.
        code=b"" if target else by_value(actor),
        args=body,
        frames=[bytes(f) for f in frames],
        window=window,
    )
    check_restarts(restarts, restart_period)
    birth = Birth(bodies=[spec], env=check_env(env))
    pool = Pool(
        [birth] * replicas,
        name=f"the ActorHandle of {actor.__qualname__}",
        preload="plain",
        fabric=FabricConfig(
            routing=strategies(routing), max_queue=max_queue, max_queue_bytes=max_queue_bytes
        ),
        config=PoolConfig(
            start_timeout=start_timeout,
            restarts=restarts,
            restart_period=restart_period,
            hang_timeout=hang_timeout,
        ),
    )
    return ActorHandle(actor, pool, birth)
