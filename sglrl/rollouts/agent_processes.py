"""Run agents in separate processes: the driver's side of ``agent_worker.py``.

The processes are actors, like those of ``sglrl.spawn``. Each sample is one call, which is sent to
the process with the fewest samples. The fabric handles cancellation, process deaths and
replacements, as for every actor call. No task of the driver waits for a sample.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from .. import tracing
from ..actors.actor import EndpointSpec, endpoints_of
from ..actors.replies import error_of
from ..actors.spawning import ActorHandle, launch_spec_of
from ..config import FabricConfig, PoolConfig
from ..control.engine_calls import ask_all, tell
from ..core import rollout_group as core
from ..core.calls import Call
from ..core.driver_listener import DriverListener
from ..core.policy_versions import Versions
from ..driver.driver import ENVELOPE_BYTES
from ..driver.launcher import LocalLauncher
from ..driver.pool import Pool
from ..errors import MessageTooLarge, ProtocolError, SglrlError, UsageError, WorkerLost
from ..sessions.live import LiveSample, LiveState
from ..sessions.session_spec import SessionSpec
from ..sessions.trajectory import Trajectory
from ..wire.calls import Item, ItemKind
from ..wire.codec import Body, Buffer
from .agent_host import Done, End, Failed, GivenUp, Late, OnEnd, ProcessLost
from .agent_messages import DONE, LATE, STALE, Outcome, Settings, error_from, sampling_to
from .agent_worker import AgentWorker
from .config import RolloutConfig
from .dataset import session_arguments
from .task_ending import GRACE_SECONDS, log_hanging, title_of

if TYPE_CHECKING:
    from ..client.client import Client

_ANY_NUMBER: Final = 1 << 30
"""The size of the actor's queues, in effect no limit: the run itself limits the samples."""
_HANG_SECONDS: Final = 300.0
_MIN_HANG_SECONDS: Final = 10.0
"""The bounds of the time after which a process with a blocked event loop is killed.

The time is the timeout of the samples, but at least ``_MIN_HANG_SECONDS`` and at most
``_HANG_SECONDS``. Without a timeout, it is ``_HANG_SECONDS``.
"""
_call_arguments: Final = Body(Any)
_START_SECONDS: Final = 120.0
_SHUTDOWN_SECONDS: Final = 5.0
_RESTARTS: Final = 12
"""The largest number of restarts of one process per minute.

The number is high, because starts are quick and one sample may kill several processes.
"""
_SUSPECT_DEATHS: Final = 4
"""The run ends after ``_SUSPECT_DEATHS * (processes + 1)`` deaths of processes in a row.

Deaths are in a row if no outcome of a sample arrives in between. A single item kills fewer
processes: see ``core/rollout_group.MAX_LOSSES``.
"""


class _Away:
    """A sample that runs in another process. This object is the ``Reply`` of its call.

    Attributes:
        alone_in: the index of the process that runs this sample as its only suspect, or None if
            the sample is not a suspect.
    """

    __slots__ = ("alone_in", "call", "processes", "sample")

    def __init__(self, processes: AgentProcesses, sample: core.Sample) -> None:
        self.processes = processes
        self.sample = sample
        self.call: Call | None = None
        self.alone_in: int | None = None

    def chunk(self, item: Item, frames: Sequence[Buffer]) -> None:
        """Ignore the chunk. The call of a sample sends no chunks."""

    def restart(self, call: Call) -> None:
        """Do nothing. An agent may have side effects, so its call does not restart."""

    def end(self, call: Call, outcome: Item | SglrlError, frames: Sequence[Buffer]) -> None:
        self.processes._call_ended(self, outcome, frames)


class AgentProcesses(DriverListener):
    """The ``AgentHost`` of agents in separate processes.

    Owns the processes, the running samples and the session arguments of their groups.

    Args:
        config: ``config.processes`` is the number of processes.
        on_turns: called with statistics of turns that a process has finished: the bytes of their
            prompts, the cached prompt tokens, the bytes of their new tokens, and their number.
        on_end: called with the end of each sample.
        on_room: called when a process is added.

    Raises:
        UsageError: the agent cannot be sent to other processes.
    """

    turns_running = None
    """None, because only the processes know the turns that run."""

    def __init__(
        self,
        client: Client,
        config: RolloutConfig,
        on_turns: Callable[[int, int, int, int], None],
        on_end: OnEnd,
        on_room: Callable[[], None],
    ) -> None:
        count = config.processes
        assert count is not None
        self._client = client
        self._config = config
        self._on_turns = on_turns
        self._on_end = on_end
        self._on_room = on_room
        self._running: dict[core.Sample, _Away] = {}
        self._suspects: set[int] = set()
        """The indices of the processes that run a suspect: see ``core/rollout_group.SUSPECT``."""
        self._arguments: dict[core.Group, Mapping[str, Any] | None] = {}
        """The arguments of a group's sessions. None: the processes derive them from the item."""
        self._dead: set[Any] = set()
        """The processes that have died since the last outcome of a sample."""
        self._max_dead = _SUSPECT_DEATHS * (count + 1)
        self.paused = False
        self._trace: dict[str, str] = {}
        """The headers of the trace in which the run was started."""
        settings = Settings(
            os.getpid(),
            client.entry,
            client.model,
            client.timeout,
            config.agent,
            config.timeout,
            config.max_staleness,
            dict(config.session),
            config.gateway,
        )
        # The class is sent by value, with all objects that it refers to, over the private socket of
        # its fork server.
        cls = type("AgentProcess", (AgentWorker,), {"settings": settings, "__module__": __name__})
        self._endpoints: dict[str, EndpointSpec] = endpoints_of(cls)
        hang = _HANG_SECONDS
        if config.timeout is not None:
            hang = min(hang, max(_MIN_HANG_SECONDS, config.timeout))
        try:
            launch_spec = launch_spec_of(cls, replicas=count, window=_ANY_NUMBER)
        except Exception as error:
            # Objects that the agent refers to may raise any exception.
            raise UsageError(
                f"this agent cannot be sent to other processes ({type(error).__name__}: {error}); "
                "pass a class, so that each process makes its own instance"
            ) from error
        pool = Pool(
            [launch_spec] * count,
            more=lambda n, present: [launch_spec] * n,
            name="the processes of a rollout",
            launcher=LocalLauncher(
                # Importing transformers takes seconds. If this process has imported it, let the
                # fork server import it for all processes.
                "tokenizer" if "transformers" in sys.modules else "plain",
                None,
                _START_SECONDS,
            ),
            fabric=FabricConfig(max_queue=_ANY_NUMBER, max_queue_bytes=_ANY_NUMBER),
            config=PoolConfig(
                start_timeout=_START_SECONDS,
                # Add the grace period of cancelled agents to the time for context managers to exit.
                shutdown_timeout=_SHUTDOWN_SECONDS + GRACE_SECONDS,
                hang_timeout=hang,
                restarts=_RESTARTS,
            ),
        )
        self._pool = pool
        self._handle = ActorHandle(cls, pool)

    @property
    def driver(self) -> Any:
        return self._pool.driver

    @property
    def _runs(self) -> bool:
        return self._pool.is_open

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
        self._client.observed.live.append(self)
        self._trace = tracing.headers()
        self.driver.add_listener(self)
        if self.paused:
            for index in self.driver.ready:
                self.before_serving(index)

    async def close(self) -> None:
        if self in self._client.observed.live:
            self._client.observed.live.remove(self)
        await self._handle.close()

    @property
    def room_for_suspect(self) -> bool:
        return len(self._suspects) < len(self.driver.ready)

    # --- start of samples -------------------------------------------------------------------------

    def begin(self, sample: core.Sample, versions: Versions) -> None:
        """Run a sample in a process. See ``AgentWorker.run``.

        Raises:
            UsageError: the item cannot be sent, or its session's arguments are wrong.
            MessageTooLarge: the item is too large.
            WorkerLost: no process is left.
        """
        body, frames = self._encode(sample, versions)
        away = _Away(self, sample)
        driver = self.driver
        call = Call("run", msgspec.Raw(body), away, frames=frames)
        call.trace = self._trace
        if sample.losses >= core.SUSPECT:
            call.pinned = next((i for i in driver.ready if i not in self._suspects), None)
        driver.submit(call)
        away.call = call
        if call.pinned is not None:
            away.alone_in = call.pinned
            self._suspects.add(call.pinned)
        self._running[sample] = away

    def forget(self, group: core.Group) -> None:
        self._arguments.pop(group, None)

    def _encode(self, sample: core.Sample, versions: Versions) -> tuple[bytes, Sequence[Buffer]]:
        """Encode the arguments of ``AgentWorker.run``."""
        group = sample.group
        arguments = self._arguments_of(group)
        numbers = group.index, group.tries, sample.index, sample.tries
        values = (*numbers, dict(versions), group.item, arguments)
        try:
            body, frames = _call_arguments.encode(values)
        except Exception as error:
            # Objects in the item may raise any exception.
            reason = str(error).partition(";")[0]
            raise UsageError(
                f"item {group.index} of the data set cannot be sent to the agents' processes: "
                f"{reason}; it may contain values that msgpack can encode, and numpy arrays"
            ) from None
        most = self.driver.max_message_bytes - ENVELOPE_BYTES
        if len(body) > most or any(len(frame) > most for frame in frames):
            raise MessageTooLarge(
                f"item {group.index} of the data set is larger than a message may be ({most:,} "
                "bytes)"
            )
        return body, frames

    def _arguments_of(self, group: core.Group) -> Mapping[str, Any] | None:
        """Return the arguments of a group's sessions, see ``_arguments``.

        Raises:
            Exception: ``open_session`` failed, or its arguments are wrong.
        """
        config = self._config
        if config.open_session is session_arguments and type(group.item) in (dict, str, list):
            return None
        if group not in self._arguments:
            own = config.open_session(group.item)
            SessionSpec.of(self._client.requests, config.session, own)
            self._arguments[group] = sampling_to(own)
        return self._arguments[group]

    # --- ends of samples --------------------------------------------------------------------------

    def oldest_versions(self, sample: core.Sample) -> Versions:
        """Return no versions, because the sample's process checks the sample's staleness."""
        return {}

    def give_up(self, sample: core.Sample, reason: str) -> None:
        away = self._running.pop(sample, None)
        if away is not None:
            self._cancel(away)
            self.driver.loop.call_soon(self._on_end, sample, GivenUp(reason))

    def stop(self) -> None:
        for away in self._running.values():
            self._cancel(away)
        self._running.clear()

    def _cancel(self, away: _Away) -> None:
        """Cancel the call of a sample, whose end is then not reported."""
        self._not_alone(away)
        if away.call is not None:
            self.driver.cancel(away.call)

    def _not_alone(self, away: _Away) -> None:
        if away.alone_in is not None:
            self._suspects.discard(away.alone_in)

    def _call_ended(
        self, away: _Away, outcome: Item | SglrlError, frames: Sequence[Buffer]
    ) -> None:
        self._not_alone(away)
        sample = away.sample
        if self._running.get(sample) is away:
            del self._running[sample]
            self._on_end(sample, self._end_of(away, outcome, frames))

    def _end_of(self, away: _Away, answer: Item | SglrlError, frames: Sequence[Buffer]) -> End:
        if isinstance(answer, WorkerLost):
            return self._lost(away, answer)
        if isinstance(answer, SglrlError):
            return Failed(answer)
        if answer.kind != ItemKind.DONE:
            return Failed(error_of(answer))
        try:
            outcome = self._endpoints["run"].result.decode(answer.body, frames)
        except ProtocolError as error:
            return Failed(error)
        return self._end_from(away, outcome)

    def _lost(self, away: _Away, error: WorkerLost) -> End:
        """Return the end of a sample whose process has died."""
        self._dead.add(away.call and away.call.worker)
        if len(self._dead) >= self._max_dead:
            error.add_note(f"and {len(self._dead)} of them died before any told of a sample")
            return Failed(error, fatal=True)
        return ProcessLost(error)

    def _end_from(self, away: _Away, outcome: Outcome) -> End:
        self._dead.clear()
        self._on_turns(
            outcome.prompt_bytes, outcome.cached_tokens, outcome.new_bytes, outcome.turns
        )
        sample = away.sample
        error = None if outcome.error is None else error_from(outcome.error)
        if outcome.hangs_at:
            title = title_of(self._config.agent, sample.index, sample.group.index)
            reason = "timeout" if outcome.how == LATE else core.STALE
            log_hanging(title, reason, outcome.hangs_at)
        if outcome.how == DONE and outcome.trajectory is not None:
            try:
                made = Trajectory.from_record(outcome.trajectory, outcome.oldest)
                return Done(made.with_decode(self._client.requests.decode))
            except ProtocolError as wrong:
                return Failed(wrong, fatal=True)
        if outcome.how == LATE and error is not None:
            return Late(error)
        if outcome.how == STALE:
            return GivenUp(core.STALE)
        if outcome.cut_off and self._client.is_open:
            self._expel(away, "it has lost its connection to the pool")
            return ProcessLost(
                WorkerLost("the process of this sample has lost its connection to the pool")
            )
        fatal = outcome.refused or outcome.fatal
        return Failed(error or ProtocolError(f"a sample ended {outcome.how!r}"), fatal)

    def _expel(self, away: _Away, reason: str) -> None:
        """Kill the process of a sample. The other samples of the process are lost, too."""
        worker = None if away.call is None else away.call.worker
        if worker is not None:
            self._pool.expel(worker.index, reason)

    # --- pause ------------------------------------------------------------------------------------

    async def pause(self) -> bool:
        self.paused = True
        if not self._runs:
            return True
        # A process that is lost meanwhile runs no more turns, so it need not answer.
        paused = await ask_all(self.driver, self._endpoints["pause"])
        return self.paused and all(paused.values())

    def resume(self) -> None:
        self.paused = False
        if self._runs:
            for index in self.driver.ready:
                tell(self.driver, self._endpoints["resume"], (), index)

    def before_serving(self, worker: int) -> None:
        """Pause a process that starts while the run is paused."""
        if self.paused:
            tell(self.driver, self._endpoints["pause"], (), worker)
        # The process serves immediately after this method.
        self.driver.loop.call_soon(self._on_room)

    # --- for programs that watch the samples ------------------------------------------------------

    async def live_samples(self) -> list[LiveSample]:
        """See ``Client.live_samples``."""
        found = await ask_all(self.driver, self._endpoints["live_samples"])
        return [sample for samples in found.values() for sample in samples]

    async def live_state(
        self, id_: str, turns: int, tokens: int, seconds: float
    ) -> LiveState | None:
        """See ``Client.live_state``."""
        endpoint = self._endpoints["live_state"]
        found = await ask_all(self.driver, endpoint, (id_, turns, tokens, seconds))
        return next((state for state in found.values() if state is not None), None)
