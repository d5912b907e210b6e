"""Run agents as tasks of this event loop."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from .. import tracing
from ..core.policy_versions import Versions
from ..core.rollout_group import Group, Sample
from ..sessions.gate import Gate
from ..sessions.record import Record
from ..sessions.session import Session
from ..sessions.session_spec import SessionSpec
from ..sessions.trajectory import record_of
from .agent import (
    Gateway,
    NotAsync,
    as_failure,
    is_late,
    load,
    made_ready,
    play,
    session_of_sample,
    too_late,
)
from .agent_host import Done, End, Failed, GivenUp, Late, OnEnd
from .config import RolloutConfig
from .sample_span import RUN_ENDED, end_sample_span, sample_span
from .task_ending import Limit, TaskSet, title_of

if TYPE_CHECKING:
    from ..client.client import Client

_TIMEOUT = "timeout"
"""The reason for cancelling an agent at its time limit."""


class _Attempt:
    """One attempt of a sample, and the owner of its task.

    Attributes:
        task: the task that runs the agent. None before its first step, so that ``give_up`` does not
            cancel the task. A task that is cancelled before its first step ends without a report.
        given_up: the reason why the sample was given up, or "".
        span: the span of the attempt. None: tracing is off, or the task has not begun.
    """

    __slots__ = ("given_up", "host", "limit", "sample", "session", "span", "task")

    def __init__(self, host: AgentTasks, sample: Sample, session: Session) -> None:
        self.host = host
        self.sample = sample
        self.session = session
        self.task: asyncio.Task[None] | None = None
        self.limit: Limit | None = None
        self.given_up = ""
        self.span: Any = None

    @property
    def title(self) -> str:
        return title_of(self.host.agent, self.sample.index, self.sample.group.index)

    def abandoned(self, reason: str) -> None:
        self.host._abandoned(self, reason)


class AgentTasks:
    """The ``AgentHost`` of agents in this process.

    Owns the agent, the running attempts and the session specs of their groups.

    Args:
        tasks: runs the tasks, and ends them with the run.
        on_turn: called after each turn with the bytes of its prompt, the number of cached prompt
            tokens, and the bytes of its new tokens.
        on_end: called with the end of each sample.
    """

    alive = True
    room_for_suspect = False

    def __init__(
        self,
        client: Client,
        config: RolloutConfig,
        tasks: TaskSet,
        on_turn: Callable[[int, int, int], None],
        on_end: OnEnd,
    ) -> None:
        self._client = client
        self.agent = config.agent
        self._config = config
        self._tasks = tasks
        self._on_turn = on_turn
        self._on_end = on_end
        self._gate = Gate()
        self._gateway: Gateway | None = None
        self._stack = AsyncExitStack()
        self._specs: dict[Group, SessionSpec] = {}
        self._running: dict[Sample, _Attempt] = {}

    async def start(self) -> None:
        tracing.look_up()
        if self._config.gateway:
            # Imported here because it needs the extra "gateway".
            from ..gateway.local import local_gateway

            self._gateway = await self._stack.enter_async_context(
                local_gateway(self._client, self._config.gateway)
            )
        self._play = await self._stack.enter_async_context(made_ready(self.agent))

    async def close(self) -> None:
        await self._stack.aclose()

    # --- samples ----------------------------------------------------------------------------------

    def begin(self, sample: Sample, versions: Versions) -> None:
        group = sample.group
        spec = self._specs.get(group)
        if spec is None:
            own = self._config.open_session(group.item)
            spec = SessionSpec.of(self._client.requests, self._config.session, own)
            self._specs[group] = spec
        session = session_of_sample(
            spec, self._gate, self._on_turn, group.index, sample.index, sample.tries
        )
        attempt = self._running[sample] = _Attempt(self, sample, session)
        self._tasks.begin(self._run(attempt), attempt)

    def forget(self, group: Group) -> None:
        self._specs.pop(group, None)

    async def _run(self, attempt: _Attempt) -> None:
        """Run one attempt and report its end. Raise only exceptions that end the program."""
        sample = attempt.sample
        numbers = sample.group.index, sample.index, sample.tries
        with sample_span(self.agent, *numbers) as attempt.span:
            end = await self._end(attempt)
            _end_span(attempt.span, end)
        self._report(attempt, end)

    async def _end(self, attempt: _Attempt) -> End:
        """Run one attempt and return its end."""
        session, timeout = attempt.session, self._config.timeout
        task = attempt.task = asyncio.current_task()
        assert task is not None
        try:
            if attempt.given_up:
                raise asyncio.CancelledError
            # Load the tokenizer before the time limit starts.
            await load(session.spec, attempt.sample.group.index, must=timeout is not None)
            if timeout is not None:
                late = functools.partial(self._tasks.abandon, task, _TIMEOUT)
                session.sampler.limit = attempt.limit = Limit(timeout, late)
            trajectory = await play(
                self._play, session, attempt.sample.group.item, attempt.limit, self._gateway
            )
            return Done(trajectory)
        except (asyncio.CancelledError, SystemExit, Exception) as error:
            return self._end_of(attempt, error)
        finally:
            session.close()

    def _end_of(self, attempt: _Attempt, error: BaseException) -> End:
        so_far = functools.partial(_so_far, attempt.session)
        if attempt.given_up:
            return GivenUp(attempt.given_up, so_far)
        if is_late(attempt.limit):
            return Late(too_late(self._config.timeout, error), so_far)
        # If a turn was refused, no other sample would get a turn, so the run must end.
        fatal = isinstance(error, NotAsync) or attempt.session.refused
        return Failed(as_failure(error), fatal, so_far)

    def _abandoned(self, attempt: _Attempt, reason: str) -> None:
        """Report the end of an attempt whose agent does not end."""
        attempt.session.close()
        so_far = functools.partial(_so_far, attempt.session)
        if attempt.given_up:
            self._report(attempt, GivenUp(attempt.given_up, so_far))
        elif reason == _TIMEOUT:
            self._report(attempt, Late(too_late(self._config.timeout, None), so_far))
        else:
            # The run has ended, and needs no report.
            self._running.pop(attempt.sample, None)

    def _report(self, attempt: _Attempt, end: End) -> None:
        # The task of an abandoned agent has not ended the span.
        _end_span(attempt.span, end)
        # An abandoned agent may end while another attempt of its sample runs. Ignore this end.
        if self._running.get(attempt.sample) is attempt:
            del self._running[attempt.sample]
            self._on_end(attempt.sample, end)

    def oldest_versions(self, sample: Sample) -> Versions:
        attempt = self._running.get(sample)
        return {} if attempt is None else attempt.session.oldest_versions

    def give_up(self, sample: Sample, reason: str) -> None:
        attempt = self._running.get(sample)
        if attempt is not None and not attempt.given_up:
            attempt.given_up = reason
            if attempt.task is not None:
                self._tasks.cancel(attempt.task, reason)

    def stop(self) -> None:
        # Close the sessions, so that agents that ignore their cancellation get no more turns.
        for attempt in self._running.values():
            attempt.session.close()
            end_sample_span(attempt.span, "given up", reason=RUN_ENDED)

    # --- pause ------------------------------------------------------------------------------------

    @property
    def paused(self) -> bool:
        return self._gate.opening is not None

    @property
    def turns_running(self) -> int:
        return self._gate.inside

    async def pause(self) -> bool:
        self._gate.close()
        return await self._gate.empty()

    def resume(self) -> None:
        self._gate.open()


def _so_far(session: Session) -> Record | None:
    """Return the turns of a session, or None without turns."""
    return record_of(session.trajectory()) if session.turns else None


def _end_span(span: Any, end: End) -> None:
    match end:
        case Done(trajectory):
            end_sample_span(span, "done", reward=trajectory.reward)
        case Failed(error):
            end_sample_span(span, "failed", error=error)
        case Late(error):
            end_sample_span(span, "late", error=error)
        case GivenUp(reason):
            end_sample_span(span, "given up", reason=reason)
