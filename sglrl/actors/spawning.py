"""``spawn``, which runs a pool of actors in worker processes, and the handle of this pool."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator, Mapping
from difflib import get_close_matches
from inspect import signature
from types import MappingProxyType, ModuleType
from typing import Any, Literal, NoReturn, Self

from ..config import (
    FabricConfig,
    PoolConfig,
    check_env,
    check_target,
    check_timeout,
    path_of,
    positive,
    strategies,
)
from ..driver.launcher import LaunchSpec, LocalLauncher
from ..driver.pool import Pool
from ..driver.worker_info import WorkerInfo, describe
from ..errors import UsageError
from ..hosts.hosts import Hosts
from ..hosts.launcher import HostLauncher
from ..hosts.started import hosts_from
from ..wire.processes import ActorSpec
from .actor import Actor, EndpointSpec, constructor_arguments, endpoints_of
from .class_pickling import by_value, importable_as, uninstalled_modules
from .handles import BroadcastNamespace, StreamNamespace, Target, UnaryCaller, WorkerHandle
from .leases import Lease, Leases


class ActorHandle:
    """A running pool of one actor class.

    * ``await handle.method(...)`` calls the least loaded worker.
    * ``handle.stream.method(...)`` returns an async iterator over the items of a stream.
    * ``await handle.broadcast.method(...)`` calls all workers.
    * ``async with handle.lease() as one`` reserves a worker for an episode that keeps state
      in the worker.
    * ``handle[i]`` is worker i, and ``for worker in handle`` iterates over the workers.

    Every call takes ``timeout=`` in seconds in addition to the endpoint's own arguments.
    """

    def __init__(self, cls: type[Actor], pool: Pool) -> None:
        self._cls = cls
        self._specs: dict[str, EndpointSpec] = endpoints_of(cls)
        self._pool = pool
        self._leases: Leases | None = None

    async def __aenter__(self) -> Self:
        await self._pool.enter()
        return self

    def __await__(self) -> Generator[Any, None, Self]:
        """Start the pool without ``async with``. ``close()`` or the program's exit closes it."""
        yield from self.__aenter__().__await__()
        self._pool.closes_at_exit()
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
        """End all calls and shut down all workers. Closing again has no effect.

        Args:
            drain: whether to first wait for the pending calls. New calls are refused meanwhile.
            timeout: maximum seconds to wait for the pending calls.
        """
        await self._pool.close(drain=drain, timeout=timeout)

    async def add_workers(self, n: int = 1) -> list[int]:
        """Start ``n`` more workers and wait until they accept calls. Return their indices.

        Raises:
            WorkerStartError: a worker failed to start. All new workers are then killed.
        """
        return await self._pool.add(positive("n", n))

    async def wait_until_full(self, timeout: float | None = 60.0) -> None:
        """Wait until every worker that was not removed or retired accepts calls.

        After the loss of a worker, this waits for the replacement.

        Raises:
            DeadlineExceeded: some workers do not accept calls after ``timeout`` seconds.
        """
        await self._pool.full(timeout)

    async def remove_worker(self, index: int, *, timeout: float | None = 600.0) -> None:
        """Let worker ``index`` finish its calls, then shut it down.

        Calls that take longer than ``timeout`` seconds are handled as if the worker were lost.
        """
        await self._pool.ending.remove(index, timeout)

    @property
    def workers(self) -> list[WorkerInfo]:
        """The pool's workers in order, including retired workers."""
        return self._pool.workers

    @property
    def stream(self) -> StreamNamespace:
        return StreamNamespace(self._pool.driver, self._specs, self._cls.__name__)

    @property
    def broadcast(self) -> BroadcastNamespace:
        return BroadcastNamespace(self._pool.driver, self._specs, self._cls.__name__)

    def lease(self, *, share: int = 1, timeout: float | None = 600.0) -> Lease:
        """Reserve one worker for an episode: ``async with handle.lease() as worker``.

        Endpoints are called as on ``handle[i]``. All calls go to the same process. With ``share=1``
        no other lease has this process until this lease ends. When the process dies, the state of
        the episode is gone. Running and later calls then raise ``WorkerLost``, even if the endpoint
        is idempotent. Begin the episode again with another lease. If the connection to the worker
        breaks and the worker returns, its object is still there, and the lease continues. But calls
        that were running may raise ``WorkerLost``.

        The end of the block releases the worker, even after an error or a cancellation. It cancels
        running calls and streams of the lease. Later calls raise ``Closed``. The object keeps
        its state, so begin each episode with a reset. Calls without a lease may go to leased
        workers.

        Args:
            share: maximum number of leases that a worker may have at the same time, including this
                one. Use more than 1 for an actor that keeps the state of several episodes apart.
            timeout: maximum seconds to wait for a worker. Leases are served in the order of their
                requests. None: no limit.

        Raises:
            DeadlineExceeded: on entering, when no worker became free in time.
            WorkerLost: on entering, when no worker is left in the pool.
            Closed: on entering, when the pool is closed.
        """
        check_timeout(timeout)
        if self._leases is None:
            self._leases = Leases(self._pool.driver)
        return Lease(
            self._leases, self._specs, self._cls.__name__, positive("share", share), timeout
        )

    def __getitem__(self, index: int) -> WorkerHandle:
        """Return a handle of worker ``index``. Its first call binds it to the worker's process.

        After the loss of this process, calls raise ``WorkerLost``. Then use ``handle[index]`` again
        to call the replacement, which has a new object.

        Raises:
            UsageError: there is no such worker.
        """
        _, index, _ = check_target(0, index, None)  # type: ignore[assignment]
        if index is None or not 0 <= index < len(self._pool.workers):
            raise UsageError(f"there is no worker {index}; this pool has {len(self._pool.workers)}")
        driver = self._pool.driver
        return WorkerHandle(driver, self._specs, self._cls.__name__, Target(index))

    def __iter__(self) -> Iterator[WorkerHandle]:
        """Iterate over the handles of the workers, in order."""
        return (self[index] for index in range(len(self)))

    def __len__(self) -> int:
        return len(self._pool.workers)

    def __getattr__(self, name: str) -> UnaryCaller:
        if name.startswith("_"):
            raise AttributeError(name)
        caller = getattr(WorkerHandle(self._pool.driver, self._specs, self._cls.__name__), name)
        # Store the caller, so that the next access does not call this method.
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
    log_dir: str | os.PathLike[str] | None = None,
    hosts: Hosts | Literal["ray", "slurm"] | None = None,
    **kwargs: Any,
) -> ActorHandle:
    """Run an actor class in worker processes: ``async with sglrl.spawn(Judge, ...) as judges``.

    Entering the block raises this process's soft limit of open files to its hard limit, but to at
    most 65,536.

    Args:
        actor: a subclass of ``sglrl.Actor``. A class defined in a module is imported by name in the
            worker. A class defined in ``__main__`` or in a function is sent by value. The user's
            script is never run again.
        args, kwargs: arguments for the ``__init__`` of the class. They must match its annotations.
        replicas: number of worker processes.
        env: environment variables of the workers, in addition to the driver's variables.
        window: maximum number of calls that one worker runs at a time. Further calls wait in the
            driver.
        routing: see ``sglrl.core.routing``.
        max_queue: maximum number of calls that wait in the driver. A further call raises
            ``Overloaded``.
        max_queue_bytes: maximum bytes of the arguments of the waiting calls. A call that exceeds
            the limit raises ``Overloaded``.
        start_timeout: maximum seconds until all workers are ready.
        hang_timeout: how many seconds the event loop of a worker with calls may stand still before
            the worker counts as hung. The worker is then killed and handled like a crash, and the
            stacks of its threads are logged. An endpoint may await for any time, but must run long
            computations in a thread. None: no limit.
        restarts: maximum number of replacements of one worker within ``restart_period`` seconds. A
            replacement is created with the same arguments. After one more loss, the pool continues
            without the worker. 0: lost workers are never replaced.
        restart_period: the length of the period for ``restarts`` in seconds.
        log_dir: folder that keeps the output of every worker, one file for each process. None: only
            the output of a worker that fails is kept, in ``logs`` in ``$SGLRL_CACHE``. Errors and
            log lines name the file.
        hosts: other machines on which the workers run, as for ``launch``. To them, the class is
            sent by value, together with the code that it uses from modules that are not installed
            packages. Packages that it imports must be installed on the hosts. None: this machine.

    Raises:
        UsageError: the class declares no endpoint, an argument has the wrong type, or an endpoint
            takes or returns a type that cannot be sent.
        WorkerStartError: on entering, when ``__init__`` raises in the worker.
    """
    machines = hosts_from(hosts)
    launch_spec = launch_spec_of(
        actor,
        args,
        kwargs,
        replicas=replicas,
        window=window,
        env=env,
        uninstalled={} if machines is None else uninstalled_modules(),
    )
    config = PoolConfig(
        start_timeout=start_timeout,
        restarts=restarts,
        restart_period=restart_period,
        hang_timeout=hang_timeout,
        log_dir=path_of("log_dir", log_dir),
    )
    pool = Pool(
        [launch_spec] * replicas,
        more=lambda n, present: [launch_spec] * n,
        name=f"the ActorHandle of {actor.__qualname__}",
        launcher=(
            LocalLauncher("plain", None, start_timeout)
            if machines is None
            else HostLauncher(machines, "plain", "cpu", start_timeout)
        ),
        fabric=FabricConfig(
            routing=strategies(routing), max_queue=max_queue, max_queue_bytes=max_queue_bytes
        ),
        config=config if machines is None else machines.reachable(config),
    )
    return ActorHandle(actor, pool)


def launch_spec_of(
    actor: type[Actor],
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    replicas: int,
    window: int,
    env: Mapping[str, str] | None = None,
    uninstalled: Mapping[str, ModuleType] = MappingProxyType({}),
) -> LaunchSpec:
    """Return the launch spec of the workers of ``spawn``. The arguments are the same as there.

    Args:
        uninstalled: modules that the workers cannot import, see ``class_pickling.by_value``.

    Raises:
        UsageError: for the same reasons as ``spawn``.
    """
    if not (isinstance(actor, type) and issubclass(actor, Actor)):
        raise UsageError(f"spawn takes a subclass of sglrl.Actor, got {actor!r}")
    if not endpoints_of(actor):
        raise UsageError(
            f"{actor.__name__} declares no endpoint; mark its methods with @sglrl.endpoint"
        )
    positive("replicas", replicas)
    positive("window", window)
    kwargs = kwargs or {}
    constructor = constructor_arguments(actor)
    for name in kwargs.keys() - constructor.signature.parameters.keys():
        options = [p.name for p in signature(spawn).parameters.values() if p.kind == p.KEYWORD_ONLY]
        if near := get_close_matches(name, options, n=1, cutoff=0.75):
            raise UsageError(
                f"neither spawn nor {actor.__name__}.__init__ has an argument {name!r}; did you "
                f"mean {near[0]!r}?"
            )
    body, frames = constructor.encode(args, dict(kwargs))
    target = importable_as(actor, uninstalled)
    spec = ActorSpec(
        target=target,
        # ``class_pickling`` describes which processes receive the code.
        code=b"" if target else by_value(actor, uninstalled),
        args=body,
        frames=[bytes(f) for f in frames],
        window=window,
    )
    return LaunchSpec(bodies=[spec], env=check_env(env))
