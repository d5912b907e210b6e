"""Agents in processes of their own: the driver's side of ``agent_worker.py``.

The processes are plain actors (``sglrl.spawn``). A sample is one call to the process with the
fewest samples. The fabric handles its cancellation, a dead process and the replacement, as for
every actor call; the driver has no task that waits for the sample.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from ..actors.actor import EndpointSpec, endpoints_of, error_of
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
"""How many samples run is said by the run, and not by its processes."""
_HANG_SECONDS: Final = 300.0
_LEAST_HANG_SECONDS: Final = 10.0
"""After which a process is ended whose event loop an agent holds up; the samples' own limit, if
that is in between."""
_START_SECONDS: Final = 120.0
_RESTARTS: Final = 12
"""Of one process in a minute. They are quickly there, and one sample may end some of them."""

OnEnd = Callable[["Away", Outcome | SglrlError], None]


class Away:
    """A sample that is played in another process. It is the ``Reply`` of its call."""

    __slots__ = ("alone_in", "call", "processes", "refused", "sample")

    oldest_version: int | None = None
    """It is known where the sample is, and looked at there."""

    def __init__(self, processes: AgentProcesses, sample: Sample) -> None:
        self.processes = processes
        self.sample = sample
        self.call: Call | None = None
        self.alone_in = -1
        """The process in which no other suspect is, if it is one."""
        self.refused = False

    def close(self) -> None:
        """It is cancelled, and nothing more is heard of it."""
        self.processes.suspects.discard(self.alone_in)
        if self.call is not None:
            self.processes.driver.cancel(self.call)

    def chunk(self, item: Item, frames: Sequence[Buffer]) -> None:
        """There are none."""

    def restart(self, call: Call) -> None:
        """An agent may have done anything: it is not begun again by itself."""

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
    """Those of one run. ``on_end`` is called with each sample that has ended, and what it has come
    to; not with those that were closed. ``on_room``: when there is one process more."""

    def __init__(
        self, settings: Settings, count: int, on_end: OnEnd, on_room: Callable[[], None]
    ) -> None:
        # By value, with what it refers to, over the private socket of their fork server.
        cls = type("AgentProcess", (AgentHost,), {"settings": settings, "__module__": __name__})
        self.count = count
        self.on_end = on_end
        self._on_room = on_room
        self._specs: dict[str, EndpointSpec] = endpoints_of(cls)
        self.run_endpoint = self._specs["run"]
        self._arguments = Body(Any)
        self.suspects: set[int] = set()
        """Processes that have one: see ``core/rollout_plan.py``."""
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
            # Whatever it refers to may refuse, in any way.
            raise UsageError(
                f"this agent cannot be sent to other processes ({type(error).__name__}: {error}); "
                "what cannot be sent must be made there: give a class, of which each process makes "
                "an instance"
            ) from error
        # Agents that were cancelled have their time to end, and what was entered to be left.
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
        """Whether a process is there, or is to come."""
        return bool(self.driver.fabric.alive)

    async def start(self) -> None:
        """Raises ``WorkerStartError``, with what the agent's class has raised."""
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
        """End the process that had it; what else it has is lost with it."""
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
        """Play it. See ``AgentHost.run``.

        Raises:
            UsageError: its item cannot be sent.
            WorkerLost: no process is left.
        """
        away = Away(self, sample)
        group = sample.group
        # As the arguments of ``AgentHost.run`` are encoded.
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
            # Whatever is in it may raise anything.
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
        """Wait until no turn runs. False: resumed before that."""
        self._paused = True
        if not self._runs:
            return True
        # What runs in a process that is lost runs no more.
        found = await ask_all(self.driver, self._specs["pause"])
        return self._paused and all(found.values())

    def resume(self) -> None:
        self._paused = False
        if self._runs:
            for index in self.driver.ready:
                tell(self.driver, self._specs["resume"], (), index)

    def before_serving(self, worker: int) -> None:
        """A process that comes while the run is paused is paused, too."""
        if self._paused:
            tell(self.driver, self._specs["pause"], (), worker)
        # When it serves, which is at once.
        self.driver.loop.call_soon(self._on_room)
