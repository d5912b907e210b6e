"""Run agents in separate processes: the driver's side of ``agent_worker.py``.

The processes are plain actors (``sglrl.spawn``). A sample is one call to the process with the
fewest samples. The fabric handles cancellation, process deaths and replacements, as for every actor
call. No task of the driver waits for a sample.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from ..actors.actor import EndpointSpec, endpoints_of
from ..actors.replies import error_of
from ..actors.spawning import ActorHandle, spawn
from ..core.calls import Call
from ..core.driver_listener import DriverListener
from ..core.rollout_plan import SUSPECT, Sample
from ..driver.driver import ENVELOPE_BYTES
from ..errors import MessageTooLarge, ProtocolError, SglrlError, UsageError
from ..inference.engine_controls import ask_all, tell
from ..wire.calls import Item, ItemKind
from ..wire.codec import Body, Buffer
from .agent_messages import Outcome, Settings
from .agent_worker import AgentHost
from .task_ending import GRACE_SECONDS

_ANY_NUMBER: Final = 1 << 30
"""No limit for the actor's queues: the run limits the number of samples."""
_HANG_SECONDS: Final = 300.0
_LEAST_HANG_SECONDS: Final = 10.0
"""A process whose event loop an agent blocks for this long is killed.

The time is the timeout of the samples, but at least ``_LEAST_HANG_SECONDS`` and at most
``_HANG_SECONDS``.
"""
_START_SECONDS: Final = 120.0
_RESTARTS: Final = 12
"""Restarts of one process per minute. A start is quick, and one sample may kill several processes.
"""

OnEnd = Callable[["Away", Outcome | SglrlError], None]


class Away:
    """A sample that runs in another process. This object is the ``Reply`` of its call."""

    __slots__ = ("alone_in", "call", "processes", "refused", "sample")

    oldest_version: int | None = None
    """The sample's process knows this version and checks it."""

    def __init__(self, processes: AgentProcesses, sample: Sample) -> None:
        self.processes = processes
        self.sample = sample
        self.call: Call | None = None
        self.alone_in = -1
        """Index of the process that runs this suspect and no other suspect; -1 if it is none."""
        self.refused = False

    def close(self) -> None:
        """Cancel the sample. Its result is dropped."""
        self.processes.suspects.discard(self.alone_in)
        if self.call is not None:
            self.processes.driver.cancel(self.call)

    def chunk(self, item: Item, frames: Sequence[Buffer]) -> None:
        """Ignore chunks: the call has none."""

    def restart(self, call: Call) -> None:
        """Do nothing. An agent may have side effects, so its call does not restart."""

    def end(self, call: Call, outcome: Item | SglrlError, frames: Sequence[Buffer]) -> None:
        found: Outcome | SglrlError
        self.processes.suspects.discard(self.alone_in)
        if isinstance(outcome, SglrlError):
            found = outcome
        elif outcome.kind != ItemKind.DONE:
            found = error_of(outcome)
        else:
            try:
                found = self.processes.run_endpoint.result.decode(outcome.body, frames)
            except ProtocolError as error:
                found = error
        self.processes.on_end(self, found)


class AgentProcesses(DriverListener):
    """The processes of one run.

    Args:
        on_end: called with each finished sample and its result. It is not called for samples that
            were closed.
        on_room: called when a process is added.
    """

    def __init__(
        self, settings: Settings, count: int, on_end: OnEnd, on_room: Callable[[], None]
    ) -> None:
        # The class is sent by value, with all objects that it refers to, over the private socket of
        # its fork server.
        cls = type("AgentProcess", (AgentHost,), {"settings": settings, "__module__": __name__})
        self.count = count
        self.on_end = on_end
        self._on_room = on_room
        self._specs: dict[str, EndpointSpec] = endpoints_of(cls)
        self.run_endpoint = self._specs["run"]
        self._arguments = Body(Any)
        self.suspects: set[int] = set()
        """Processes that run a suspect: see ``core/rollout_plan.py``."""
        self._paused = False
        hang = _HANG_SECONDS
        if settings.timeout is not None:
            hang = min(hang, max(_LEAST_HANG_SECONDS, settings.timeout))
        try:
            self._handle: ActorHandle = spawn(
                cls,
                replicas=count,
                window=_ANY_NUMBER,
                max_queue=_ANY_NUMBER,
                max_queue_bytes=_ANY_NUMBER,
                start_timeout=_START_SECONDS,
                hang_timeout=hang,
                restarts=_RESTARTS,
            )
        except Exception as error:
            # Objects that the agent refers to may raise any exception.
            raise UsageError(
                f"this agent cannot be sent to other processes ({type(error).__name__}: {error}); "
                "what cannot be sent must be made there: give a class, of which each process makes "
                "an instance"
            ) from error
        # Cancelled agents get their grace period, and context managers get time to exit.
        pool = self._handle._pool
        shutdown = pool._config.shutdown_timeout + GRACE_SECONDS
        pool._config = msgspec.structs.replace(pool._config, shutdown_timeout=shutdown)

    @property
    def driver(self) -> Any:
        return self._handle._pool.driver

    @property
    def _runs(self) -> bool:
        driver = self._handle._pool._driver
        return driver is not None and not driver.fabric.closed

    @property
    def alive(self) -> bool:
        """Whether a process is running or will start."""
        return bool(self.driver.fabric.alive)

    async def start(self) -> None:
        """Start the processes.

        Raises:
            WorkerStartError: a process did not start. The error includes the exception that the
                agent's class raised.
        """
        await self._handle.__aenter__()
        self.driver.add_listener(self)
        if self._paused:
            for index in self.driver.ready:
                self.before_serving(index)

    async def close(self) -> None:
        await self._handle.close()

    @property
    def room_for_suspect(self) -> bool:
        return len(self.suspects) < len(self.driver.ready)

    def expel(self, away: Away, reason: str) -> None:
        """Kill the process of a sample. Its other samples are lost, too."""
        worker = None if away.call is None else away.call.worker
        if worker is not None:
            self._handle._pool.expel(worker.index, reason)

    def begin(
        self,
        sample: Sample,
        seed: int | None,
        version: int,
        arguments: Mapping[str, Any] | None,
    ) -> Away:
        """Run a sample in a process. See ``AgentHost.run``.

        Raises:
            UsageError: the item cannot be sent.
            WorkerLost: no process is left.
        """
        away = Away(self, sample)
        group = sample.group
        # The arguments of ``AgentHost.run`` are encoded like this.
        call_arguments = (
            group.index,
            group.tries,
            sample.index,
            seed,
            version,
            group.item,
            arguments,
        )
        try:
            body, frames = self._arguments.encode(call_arguments)
        except Exception as error:
            # Objects in the item may raise any exception.
            reason = str(error).partition(";")[0]
            raise UsageError(
                f"item {group.index} of the data set cannot be sent to the agents' processes: "
                f"{reason}; it may hold what msgpack can, and numpy arrays; the rest is "
                "to be made there"
            ) from None
        driver = self.driver
        most = driver.max_message_bytes - ENVELOPE_BYTES
        if len(body) > most or any(len(frame) > most for frame in frames):
            raise MessageTooLarge(
                f"item {group.index} of the data set is larger than a message may be ({most:,} "
                "bytes)"
            )
        call = Call("run", msgspec.Raw(body), away, frames=frames)
        if sample.losses >= SUSPECT:
            alone = next((i for i in driver.ready if i not in self.suspects), None)
            if alone is not None:
                call.pinned = alone
        driver.submit(call)
        away.call = call
        if call.pinned is not None:
            away.alone_in = call.pinned
            self.suspects.add(call.pinned)
        return away

    async def pause(self) -> bool:
        """Wait until no turn runs. Return False if the run was resumed before that."""
        self._paused = True
        if not self._runs:
            return True
        # Turns of a lost process do not run any more.
        found = await ask_all(self.driver, self._specs["pause"])
        return self._paused and all(found.values())

    def resume(self) -> None:
        self._paused = False
        if self._runs:
            for index in self.driver.ready:
                tell(self.driver, self._specs["resume"], (), index)

    def before_serving(self, worker: int) -> None:
        """Pause a process that starts while the run is paused."""
        if self._paused:
            tell(self.driver, self._specs["pause"], (), worker)
        # The process serves immediately after this method.
        self.driver.loop.call_soon(self._on_room)
