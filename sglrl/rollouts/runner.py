"""Run an agent over a data set: keep the engines full, deliver groups as they finish.

``Plan`` (``core/rollout_plan.py``) decides which samples run and which groups are delivered. This
module owns the tasks. One task starts samples. Each agent runs in a task of its own. The run
cancels these tasks when it ends. If an agent does not end, the run continues without it
(``task_ending.py``).
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import math
import os
import time
from collections import deque
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Callable,
    Coroutine,
    Iterable,
    Mapping,
)
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, Literal, Self

from ..config import check_timeout
from ..core import rollout_plan as core
from ..core.concurrency import Concurrency
from ..core.driver_listener import DriverListener
from ..core.failures import Kind
from ..errors import (
    Closed,
    DeadlineExceeded,
    ProtocolError,
    SglrlError,
    UsageError,
    WorkerLost,
)
from ..inference.sampling import SamplingParams, own_names
from ..sessions.gate import Gate
from ..sessions.session import Session, session_of_sample
from ..sessions.session_spec import SessionSpec
from ..sessions.trajectory import Trajectory
from .agent import Agent, NotAsync, as_failure, is_late, made_ready, play, too_late
from .agent_messages import DONE, LATE, STALE, Outcome, Settings, error_from, sampling_to
from .dataset import Items, length, session_arguments
from .failures import FailureLog
from .group import Group, RolloutMetrics
from .progress import RolloutProgress
from .task_ending import GRACE_SECONDS, Grace, Limit, end_without, name_of, stack_of

if TYPE_CHECKING:
    from ..inference.client import Client
    from .agent_processes import AgentProcesses, Away

logger = logging.getLogger("sglrl.rollout")

OnError = Literal["retry", "drop", "raise"]

_SUSPECT = 32
"""The run ends if this many samples have finished and none was successful: the agent is faulty."""
_SUSPECT_DEATHS = 4
"""The run ends after too many deaths of processes in a row without any outcome of a sample.

The limit is this number for each process, and once more. One item kills each process at most this
often: see ``core/rollout_plan.py``.
"""
_MOST_SAMPLES = 100_000
"""Maximum samples of an item. All samples of a group are created when the group begins."""
_RECENT = 256
"""Number of samples for the mean reward."""
_HINT_SECONDS = 10.0
"""Wait of a consumer before the log says that only new weights will help."""
_LOOK_SECONDS = 0.05
"""Minimum interval between two polls of the engines' load."""
_ENDED = "the run has ended"
"""The reason for cancelling a task at the end. Other reasons are those for losing samples."""


def rollout(
    client: Client,
    agent: Agent,
    dataset: Iterable[Any] | AsyncIterable[Any],
    *,
    group_size: int = 1,
    concurrency: int | None = None,
    batch_size: int | None = None,
    max_staleness: int | None = None,
    timeout: float | None = None,
    on_error: OnError = "retry",
    retries: int = 2,
    max_failure_rate: float | None = 0.9,
    min_group: int | None = None,
    keep: Callable[[Group], bool] | None = None,
    open_session: Callable[[Any], Mapping[str, Any]] | None = None,
    ahead: int | None = None,
    processes: int | None = None,
    progress: bool | None = None,
    state: Mapping[str, Any] | None = None,
    seed: int | None = None,
    sampling: SamplingParams | None = None,
    **values: Any,
) -> Rollout:
    """Run ``agent`` over a data set and deliver groups of trajectories as they finish.

    ::

        async def agent(session, item):
            turn = await session.generate(max_new_tokens=64)
            return float(item["answer"] in turn.text)

        async for group in sglrl.rollout(client, agent, items, group_size=8):
            train(group)

    With thousands of samples at a time, Python's cyclic garbage collector takes as long as all
    other work of the run. Call ``gc.freeze(); gc.set_threshold(50_000, 20, 100)`` once, at the
    start of the program. This reduces the collector's time to a fraction (``python -m
    bench.rollout``: 142 to 98 us a turn).

    Args:
        agent: ``await agent(session, item)`` returns the reward or a ``Trajectory``. It may return
            None if it has called ``session.reward``. If the agent is a class, the run makes an
            instance, and enters it if it is a context manager. With ``processes``, each process
            does this.
        dataset: items; each item becomes one group. A text is a prompt, and a list of messages is a
            conversation. In a mapping, "prompt", "messages" or "input_ids" is used. For other
            items, or more arguments, pass ``open_session``.
        group_size: samples of each item.
        concurrency: samples at a time. None: the number that keeps the engines full, found from
            their reports (KV cache in use, waiting requests, preempted requests).
        batch_size: groups that one weight update trains on. ``batches`` yields lists of this
            length.
        max_staleness: with policy version v at most ``(v + max_staleness + 1) * batch_size`` groups
            begin, and no delivered token is more versions old than this. 0 is synchronous
            training: every token is of the current policy. None: no bound.
        timeout: seconds that a sample may take, without pauses. After that the sample is cancelled
            and lost. An agent may fail to end within 5 s after its cancellation, for any reason.
            Then it is closed where it waits, its stack is logged, and the run continues or ends
            without it.
        on_error: the reaction to an exception of the agent. "retry" runs the sample again, at most
            ``retries`` times, and then drops it. "drop" drops it at once. "raise" raises the
            exception from this iterator. A ``UsageError`` is not retried. In every mode the run
            raises if its first 32 samples fail, or all samples if there are fewer.
        retries: maximum reruns of a sample, in total. A group that was given up begins again with
            the samples that have reruns left, if these are enough for a group. So no sample runs
            more than ``1 + retries`` times. Runs that end with their process do not count: see
            ``processes``.
        max_failure_rate: the run raises ``RolloutFailed`` when more than this share of the latest
            attempts has failed, because the agent raised or was late. The error states the most
            frequent error. The latest attempts are 4 times ``concurrency``, and at least 64. None:
            no limit.
        min_group: a group with fewer samples left is given up. None: 2, or 1 if ``group_size`` is
            1.
        keep: returns False to filter out a finished group. Another group takes its place in the
            batch. See ``sglrl.rl.has_signal``.
        open_session: returns the arguments of ``Client.session`` for an item.
        ahead: maximum finished groups that wait to be taken; at this number no further group
            begins. None: 64, or two batches if that is more.
        processes: run the agents in this many separate processes, and not on this event loop. This
            is for agents that compute. See below.
        progress: show the progress on a terminal, or in the log. True: always. None: on a terminal
            only.
        state: the ``state_dict`` of an earlier run. Items that this run had finished are skipped.
        seed: makes every sample's draws repeatable. Each sample has its own seeds.
        sampling, **values: sampling parameters of turns, unless the agent passes others.

    With ``processes``:

    * Turns still go through this process. A thread that computes in Python delays them: see
      ``sys.setswitchinterval``.
    * The processes get the agent by value, with all objects that it refers to. They import modules
      anew. They get items as msgpack decodes them: tuples and sets become lists, and dataclasses
      become mappings.
    * Output of the agents goes to the output of this process. Their exceptions are a
      ``RemoteError`` here.
    * ``metrics`` includes a turn when a sample of the same process ends.
    * A process that dies is replaced, and its samples run again. An item is dropped when one of its
      samples has lost its process four times.
    * A process whose event loop is blocked for too long is killed and handled like a crash. The
      limit is 300 s, or ``timeout`` if that is less, but at least 10 s.
    * ``seed`` applies to the engine's draws and not to draws of the agents themselves.

    Raises:
        UsageError: an argument is wrong.
    """
    return Rollout(
        client,
        agent,
        dataset,
        group_size=group_size,
        concurrency=concurrency,
        batch_size=batch_size,
        max_staleness=max_staleness,
        timeout=timeout,
        on_error=on_error,
        retries=retries,
        max_failure_rate=max_failure_rate,
        min_group=min_group,
        keep=keep,
        open_session=open_session or session_arguments,
        ahead=ahead,
        processes=processes,
        progress=progress,
        state=state,
        seed=seed,
        sampling=sampling,
        values=values,
    )


class _LoadListener(DriverListener):
    def __init__(self, look: Callable[[], None]) -> None:
        self._look = look

    def on_loads(self) -> None:
        self._look()


class Rollout:
    """A run of an agent over a data set; see ``rollout``.

    ``async for group in run`` is sufficient. ``async with run`` also ends the remaining work when
    the block is left early. A run supports only one consumer at a time.
    """

    def __init__(
        self,
        client: Client,
        agent: Agent,
        dataset: Iterable[Any] | AsyncIterable[Any],
        *,
        group_size: int,
        concurrency: int | None,
        batch_size: int | None,
        max_staleness: int | None,
        timeout: float | None,
        on_error: OnError,
        retries: int,
        max_failure_rate: float | None,
        min_group: int | None,
        keep: Callable[[Group], bool] | None,
        open_session: Callable[[Any], Mapping[str, Any]],
        ahead: int | None,
        processes: int | None,
        progress: bool | None,
        state: Mapping[str, Any] | None,
        seed: int | None,
        sampling: SamplingParams | None,
        values: dict[str, Any],
    ) -> None:
        for name, value, least in (
            ("group_size", group_size, 1),
            ("concurrency", concurrency, 1),
            ("batch_size", batch_size, 1),
            ("max_staleness", max_staleness, 0),
            ("retries", retries, 0),
            ("min_group", min_group, 1),
            ("ahead", ahead, 1),
            ("processes", processes, 1),
        ):
            if value is not None and (type(value) is not int or value < least):
                raise UsageError(f"{name} must be an integer of at least {least}, got {value!r}")
        if on_error not in ("retry", "drop", "raise"):
            raise UsageError(f"on_error must be 'retry', 'drop' or 'raise', got {on_error!r}")
        if max_staleness is not None and batch_size is None:
            raise UsageError("max_staleness needs batch_size: the groups of one weight update")
        if min_group is not None and min_group > group_size:
            raise UsageError(f"min_group={min_group} is more than group_size={group_size}")
        rate: object = max_failure_rate
        if rate is not None and (
            isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 0 < rate <= 1
        ):
            raise UsageError(f"max_failure_rate must be None or in (0, 1], got {rate!r}")
        timeout = check_timeout(timeout)
        if timeout == 0:
            raise UsageError(f"timeout must be more than 0 seconds, got {timeout!r}")
        for name, given in (("agent", agent), ("keep", keep), ("open_session", open_session)):
            if not callable(given) and not (name == "keep" and given is None):
                raise UsageError(f"{name} must be callable, got {given!r}")
        for name, given in (("keep", keep), ("open_session", open_session)):
            if inspect.iscoroutinefunction(given):
                raise UsageError(f"{name} must be a plain function, not async")
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
            raise UsageError(f"seed must be an integer, got {seed!r}")
        # Wrong sampling values raise here, not in every sample.
        requests = client._started()
        requests.samplings.prepare(sampling, values)
        most = requests.driver.max_queue + requests.driver.windows(None)
        if concurrency is not None:
            # These samples do not all run at the same time.
            most = max(most, _MOST_SAMPLES)
        if group_size > most:
            raise UsageError(
                f"group_size={group_size:,} is too large: at most {most:,} samples of an item can "
                "run. Give concurrency= if there are fewer calls that the pool can take (the "
                "workers' windows and max_queue), or sample the item in several groups"
            )
        self._client = client
        self._agent = agent
        self._items = Items(dataset, self._is_wanted, self._read_one)
        self.batch_size = batch_size
        self._timeout = timeout
        self._on_error = on_error
        self._keep = keep
        self._open_session = open_session
        self._seed = seed
        self._sampling = sampling
        self._values = own_names(values)
        self._plan = core.Plan(
            group_size=group_size,
            min_group=min(2, group_size) if min_group is None else min_group,
            retries=retries,
            batch_size=batch_size,
            max_staleness=max_staleness,
            ahead=max(64, 2 * (batch_size or 1)) if ahead is None else ahead,
        )
        least = max(group_size, 4 * len(client.workers))
        self._limit = Concurrency(least) if concurrency is None else None
        self._fixed = concurrency
        self._state = _checked_state(state)
        self._wake = asyncio.Event()
        self._specs: dict[core.Group, SessionSpec] = {}
        self._asked: dict[core.Group, Mapping[str, Any] | None] = {}
        """Arguments of a group's sessions in other processes.

        None: these processes derive the arguments from the item.
        """
        self._running: dict[core.Sample, Session | Away] = {}
        self._tasks: dict[core.Sample, asyncio.Task[None]] = {}
        """Tasks of running samples that have taken their first step.

        A task that is cancelled before its first step would end without an exception in the agent.
        """
        self._alive: dict[asyncio.Task[None], core.Sample | None] = {}
        """All tasks of the run that have not ended: those of samples, and the data set's reader."""
        self._all_ended: asyncio.Future[None] | None = None
        self._given_up: dict[core.Sample, str] = {}
        self._dead: set[Any] = set()
        """Processes that have died since the last outcome of a sample."""
        self._hopeless = False
        """No sample can succeed."""
        self._gate = Gate()
        self._arrival: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None
        self._closed = False
        self._partial: list[Group] = []
        self._rewards: deque[float] = deque(maxlen=_RECENT)
        self._turns = self._cached = 0
        self._generated_bytes = self._prompt_bytes = 0
        # This avoids a new bound method for every session.
        self._count: Callable[[int, int, int], None] = self._on_turn
        self._staleness = 0
        self._failures = self._successes = 0
        self._log = FailureLog(max_failure_rate)
        self._looped = False
        """A loop runs over the run itself, without ``async with``."""
        self._processes: AgentProcesses | None = None
        if processes is not None:
            # Imported here because it imports sockets. Trajectories and their files need none.
            from .agent_processes import AgentProcesses

            settings = Settings(
                os.getpid(),
                client._running().max_message_bytes,
                *client._way_in,
                client.model,
                client._timeout,
                agent,
                timeout,
                max_staleness,
                sampling,
                self._values,
            )
            self._processes = AgentProcesses(settings, processes, self._on_away, self._wake.set)
        self._entered = False
        self._stack = AsyncExitStack()
        """The contexts that the run has entered: those of its agent or of its processes."""
        self._fatal = False
        """An error has ended the run and all its tasks."""
        self._broken: BaseException | None = None
        """This error, if it did not come from the run's main task."""
        self._begun = self._looked = 0.0
        self._ended_at: float | None = None
        self.errors: deque[Exception] = deque(maxlen=100)
        """The latest exceptions of the agent, and errors for late agents."""
        total = length(dataset)
        if total is not None:
            done, unfinished = self._state
            total -= min(total, done - len(unfinished))
        self._progress = RolloutProgress(total, progress)
        self._loads = _LoadListener(self._look)

    # --- start and end ----------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        if self._closed or self._entered:
            raise UsageError("a run is begun once; make another one")
        self._entered = True
        try:
            if self._processes is not None:
                self._stack.push_async_callback(self._processes.close)
                await self._processes.start()
            else:
                self._play = await self._stack.enter_async_context(made_ready(self._agent))
            if self._closed:
                raise Closed("the run was closed while it started")
            self._begin()
        except BaseException:
            self._closed = True
            await self._stack.aclose()
            raise
        return self

    def _begin(self) -> None:
        self._begun = time.monotonic()
        weights = self._client._pool.weights
        self._plan.version = self._plan.first_version = weights.version
        weights.on_version.add(self._on_version)
        if self._limit is not None:
            self._client._running().add_listener(self._loads)
        self._progress.begin()
        self._task = asyncio.create_task(self._run(), name="sglrl rollout")

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        plan = self._plan
        state = "closed" if self._closed else "not begun" if self._task is None else "running"
        return (
            f"<Rollout, {state}: {plan.taken} groups taken, {len(plan.ready)} ready, "
            f"{self.metrics.samples_running} samples running>"
        )

    async def close(self) -> None:
        """Cancel running samples. Ready groups can no longer be taken. Safe to call again."""
        self._closed = True
        try:
            if self._task is not None:
                await self._end(self._task)
            elif self._processes is not None:
                # The processes may be starting.
                await self._processes.close()
        finally:
            if self._task is not None:
                await self._stack.aclose()
                self._ended_at = self._ended_at or time.monotonic()
                self._progress.end(self.metrics)
            self._tell_takers()

    async def _end(self, task: asyncio.Task[None]) -> None:
        task.cancel()
        self._client._pool.weights.on_version.discard(self._on_version)
        driver = self._client._driver
        if self._limit is not None and driver is not None:
            driver.remove_listener(self._loads)
        # ``take`` has raised the task's exception, or no consumer needs it.
        await asyncio.wait([task])

    async def _run(self) -> None:
        try:
            try:
                while not self._plan.over:
                    self._wake.clear()
                    self._fill()
                    if self._broken is not None:
                        raise self._broken
                    await self._wake.wait()
                if self._broken is not None:
                    raise self._broken
            except BaseException:
                self._fatal = True
                # Agents that continue after their cancellation get no turn and wait for none.
                for session in self._running.values():
                    session.close()
                self._cancel_all()
                raise
            finally:
                await self._end_tasks()
        except BaseException as failure:
            self._failure = failure
            if isinstance(failure, asyncio.CancelledError):
                raise
        finally:
            self._ended_at = time.monotonic()
            self._log.log_totals()
            self._tell_takers()

    # --- tasks ------------------------------------------------------------------------------------

    def _begin_task(
        self, work: Coroutine[Any, Any, None], sample: core.Sample | None = None
    ) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._alive[task] = sample
        task.add_done_callback(self._task_ended)
        return task

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if task not in self._alive:
            # The run has continued without this task.
            return
        del self._alive[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            self._break_off(error)
        self._tell_all_ended()

    def _break_off(self, error: BaseException) -> None:
        """End the run with an error."""
        self._fatal = True
        self._broken = self._broken or error
        self._wake.set()

    def _cancel(self, task: asyncio.Task[None], reason: str) -> None:
        task.cancel()
        Grace(task, functools.partial(self._go_on_without, task, reason))

    def _cancel_all(self) -> None:
        for task in list(self._alive):
            self._cancel(task, _ENDED)

    async def _end_tasks(self) -> None:
        """Wait until all tasks have ended, at most for the grace period.

        The tasks were cancelled, or were about to end.
        """
        cancelled: asyncio.CancelledError | None = None
        while self._alive:
            self._all_ended = asyncio.get_running_loop().create_future()
            try:
                await self._all_ended
            except asyncio.CancelledError as error:
                cancelled = error
                self._cancel_all()
        if cancelled is not None:
            raise cancelled

    def _tell_all_ended(self) -> None:
        if not self._alive and self._all_ended is not None and not self._all_ended.done():
            self._all_ended.set_result(None)

    def _go_on_without(self, task: asyncio.Task[None], reason: str) -> None:
        """Continue without a cancelled task that has not ended. Lose its sample for ``reason``."""
        if task.done() or task not in self._alive:
            return
        sample = self._alive.pop(task)
        self._log_hanging(sample, reason, stack_of(task))
        if sample is not None and self._tasks.get(sample) is task:
            del self._tasks[sample]
            self._running[sample].close()
            try:
                self._lost_hanging(sample, reason)
            except BaseException as error:
                self._break_off(error)
        end_without(task)
        self._tell_all_ended()

    def _lost_hanging(self, sample: core.Sample, reason: str) -> None:
        given_up = self._given_up.pop(sample, None)
        if self._is_ending:
            return
        if given_up is None:
            self._count_failure(too_late(self._timeout, None))
        self._ended(sample, given_up or reason)

    def _log_hanging(self, sample: core.Sample | None, reason: str, stack: str) -> None:
        what = "the data set"
        if sample is not None:
            name = name_of(self._agent)
            what = f"agent {name} with sample {sample.index} of item {sample.group.index}"
        logger.error(
            "%s was cancelled (%s) and did not end within %g s; the run goes on without it. It "
            "waits here:\n%s",
            what,
            reason,
            GRACE_SECONDS,
            stack,
        )

    # --- samples ----------------------------------------------------------------------------------

    def _fill(self) -> None:
        plan, items = self._plan, self._items
        while self._gate.opening is None and plan.running < self.concurrency:
            alone = bool(plan.suspects) and self._has_room_for_suspect()
            sample = plan.start(suspect=alone)
            if sample is not None:
                self._start(sample)
                continue
            if not plan.may_begin():
                if plan.max_staleness is not None:
                    # A consumer that waits for a group must know whether another group will come.
                    items.look(self._begin_task)
                break
            if plan.begin_again():
                continue
            found = items.take(self._begin_task)
            if found is None:
                break
            plan.begin(*found)
        if items.exhausted and not plan.exhausted:
            plan.exhausted = True
            self._tell_takers()
        if plan.over:
            self._wake.set()
            self._tell_takers()

    def _has_room_for_suspect(self) -> bool:
        return self._processes is not None and self._processes.room_for_suspect

    def _is_wanted(self, index: int) -> bool:
        """Return whether the item of this number was not finished in an earlier run."""
        done, unfinished = self._state
        return index >= done or index in unfinished

    def _read_one(self) -> None:
        self._wake.set()

    def _start(self, sample: core.Sample) -> None:
        group = sample.group
        seed = None if self._seed is None else _seed(self._seed, sample)
        if self._processes is not None:
            try:
                self._running[sample] = self._processes.begin(
                    sample, seed, self._plan.version, self._ask_for(group)
                )
            except Exception as error:
                self._failed(sample, error)
            return
        spec = self._specs.get(group)
        if spec is None:
            try:
                found = self._open_session(group.item)
                spec = SessionSpec.of(self._client, found, self._values, self._sampling)
            except Exception as error:
                self._failed(sample, error)
                return
            self._specs[group] = spec
        session = session_of_sample(spec, self._gate, self._count, seed, group.index, sample.index)
        self._running[sample] = session
        self._begin_task(self._one(sample, session), sample)

    def _ask_for(self, group: core.Group) -> Mapping[str, Any] | None:
        """Return the entry of ``_asked`` for a group.

        Raise an exception for wrong arguments, as far as this process can check them.
        """
        if self._open_session is session_arguments and type(group.item) in (dict, str, list):
            return None
        if group not in self._asked:
            found = self._open_session(group.item)
            SessionSpec.of(self._client, found, self._values, self._sampling)
            self._asked[group] = sampling_to(found)
        return self._asked[group]

    async def _one(self, sample: core.Sample, session: Session) -> None:
        """Run one sample to its end. Raise only exceptions that end the run."""
        limit: Limit | None = None
        task = asyncio.current_task()
        assert task is not None
        self._tasks[sample] = task
        try:
            try:
                if sample in self._given_up:
                    raise asyncio.CancelledError
                if self._timeout is not None:
                    # Load the tokenizer before the time limit starts.
                    await session._spec.ids()
                    late = functools.partial(self._go_on_without, task, "timeout")
                    session._limit = limit = Limit(self._timeout, late)
                trajectory = await play(self._play, session, sample.group.item, limit)
            except (asyncio.CancelledError, SystemExit, Exception) as error:
                # Ignore the sample if the run has continued without it.
                if self._tasks.get(sample) is task:
                    self._went_wrong(sample, error, limit)
            else:
                if self._tasks.get(sample) is task:
                    self._went_well(sample, trajectory)
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException:
            self._fatal = True
            raise
        finally:
            if self._tasks.get(sample) is task:
                del self._tasks[sample]
            session.close()

    def _went_wrong(self, sample: core.Sample, error: BaseException, limit: Limit | None) -> None:
        """Handle an exception of the agent. Raise exceptions that end the run."""
        reason = self._given_up.pop(sample, None)
        if reason is None and self._is_ending and not isinstance(error, asyncio.CancelledError):
            # An exception during the cancellation is not a failure of the agent.
            raise asyncio.CancelledError from error
        if reason is not None:
            self._ended(sample, reason)
        elif isinstance(error, asyncio.CancelledError) and self._is_ending:
            raise error
        elif is_late(limit):
            self._count_failure(too_late(self._timeout, error))
            self._ended(sample, "timeout")
        else:
            self._hopeless |= isinstance(error, NotAsync)
            self._failed(sample, as_failure(error))

    def _went_well(self, sample: core.Sample, trajectory: Trajectory) -> None:
        if self._given_up:
            self._given_up.pop(sample, None)
        self._successes += 1
        self._log.went_well(self.concurrency)
        self._rewards.append(trajectory.reward)
        del self._running[sample]
        self._settle(sample.group, self._plan.done(sample, trajectory, trajectory.oldest_version))

    def _on_away(self, away: Away, outcome: Outcome | SglrlError) -> None:
        """Handle the end of a sample that ran in another process."""
        sample = away.sample
        if self._closed or self._running.get(sample) is not away:
            return
        try:
            if isinstance(outcome, WorkerLost):
                self._dead.add(away.call and away.call.worker)
                self._interrupted(sample, outcome)
            elif isinstance(outcome, SglrlError):
                self._failed(sample, outcome)
            else:
                self._take_in(sample, away, outcome)
        except BaseException as error:
            self._break_off(error)

    def _take_in(self, sample: core.Sample, away: Away, outcome: Outcome) -> None:
        self._dead.clear()
        self._turns += outcome.turns
        self._prompt_bytes += outcome.prompt_bytes
        self._cached += outcome.cached_tokens
        self._generated_bytes += outcome.new_bytes
        error = None if outcome.error is None else error_from(outcome.error)
        if outcome.hangs_at:
            self._log_hanging(
                sample, "timeout" if outcome.how == LATE else core.STALE, outcome.hangs_at
            )
        if outcome.how == DONE and outcome.trajectory is not None:
            trajectory = Trajectory.from_record(outcome.trajectory, outcome.oldest)
            self._went_well(sample, trajectory)
        elif outcome.how == LATE and isinstance(error, Exception):
            self._count_failure(error)
            self._ended(sample, "timeout")
        elif outcome.how == STALE:
            self._ended(sample, core.STALE)
        elif outcome.cut_off and self._client._is_connected:
            assert self._processes is not None
            lost = WorkerLost("the process of this sample has lost its connection to the pool")
            self._interrupted(sample, lost)
            self._processes.expel(away, "it has lost its connection to the pool")
        else:
            away.refused = outcome.refused
            self._hopeless |= outcome.fatal
            self._failed(sample, error or ProtocolError(f"a sample ended {outcome.how!r}"))

    def _interrupted(self, sample: core.Sample, error: WorkerLost) -> None:
        """Handle the loss of a sample's process for an unknown reason."""
        assert self._processes is not None
        if len(self._dead) >= _SUSPECT_DEATHS * (self._processes.count + 1):
            error.add_note(f"and {len(self._dead)} of them died before any told of a sample")
            self._count_failure(error, fatal=True)
        if not self._client._is_alive or not self._processes.alive:
            self._failed(sample, error)
        elif self._plan.interrupted(sample):
            self.errors.append(error)
            self._running.pop(sample, None)
            self._progress.show(lambda: self.metrics)
            self._wake.set()
        else:
            error.add_note(f"this sample has now lost its process {core.MOST_LOSSES + 1} times")
            self._failed(sample, error, condemned=True)

    @property
    def _is_ending(self) -> bool:
        """Whether the whole run is ending, and not only one sample."""
        task = self._task
        return self._closed or self._fatal or (task is not None and task.cancelling() > 0)

    def _count_failure(self, error: Exception, *, fatal: bool = False) -> Kind:
        """Count a failure.

        Raises:
            Exception: ``error`` itself, if it is ``fatal``, or if all samples so far have failed.
            RolloutFailed: too many attempts have failed.
        """
        self.errors.append(error)
        self._failures += 1
        if self._failures >= _SUSPECT and not self._successes:
            error.add_note(f"and none of the first {self._failures} samples ended well")
            fatal = True
        try:
            if fatal:
                raise error
            return self._log.count(error, self.concurrency)
        except BaseException:
            self._fatal = True
            raise

    def _failed(self, sample: core.Sample, error: Exception, *, condemned: bool = False) -> None:
        session = self._running.get(sample)
        # No other sample would get a turn either, however the agent handled this error.
        refused = (
            not self._client._is_alive
            or (session is not None and session.refused)
            or (self._processes is not None and not self._processes.alive)
        )
        fatal = self._on_error == "raise" or refused or self._hopeless
        kind = self._count_failure(error, fatal=fatal)
        retry = self._on_error == "retry" and not isinstance(error, UsageError)
        self._log.log(kind, error, sample.index, sample.group.index)
        if condemned:
            self._running.pop(sample, None)
            self._plan.condemned(sample, "error")
            self._settle(sample.group, None)
        else:
            self._ended(sample, "error", retry=retry, final=not retry)

    def _ended(
        self, sample: core.Sample, reason: str, *, retry: bool = False, final: bool = False
    ) -> None:
        self._running.pop(sample, None)
        ready = self._plan.failed(sample, reason, retry=retry, final=final)
        self._settle(sample.group, ready)

    def _settle(self, group: core.Group, ready: core.Group | None) -> None:
        """Handle the end of a sample. The group has ended, too, if it is ``ready``."""
        if ready is not None and self._keep is not None and not self._keep(self._made(ready)):
            self._plan.filter(ready)
        elif ready is not None:
            self._tell_takers()
        if group.state is not core.RUNNING:
            self._specs.pop(group, None)
            self._asked.pop(group, None)
            if group.state is core.DROPPED:
                self._give_up(group.samples)
        self._progress.show(lambda: self.metrics)
        self._wake.set()

    def _give_up(self, samples: Iterable[core.Sample]) -> None:
        """Cancel the running samples that are no longer useful."""
        for sample in samples:
            if sample not in self._running or sample in self._given_up:
                continue
            running = self._running[sample]
            if self._plan.is_stale(sample, running.oldest_version):
                alive = sample.group.state is core.RUNNING
                self._given_up[sample] = core.STALE if alive else core.GIVEN_UP
                if not isinstance(running, Session):
                    running.close()
                    asyncio.get_running_loop().call_soon(self._cancelled, sample)
                if sample in self._tasks:
                    self._cancel(self._tasks[sample], self._given_up[sample])

    def _cancelled(self, sample: core.Sample) -> None:
        """Handle a sample that was given up in another process."""
        reason = self._given_up.pop(sample, None)
        if reason is not None and sample in self._running:
            self._ended(sample, reason)

    def _on_version(self) -> None:
        plan = self._plan
        plan.advance(self._client.weight_version)
        for kept in (self._specs, self._asked):
            for group in [g for g in kept if g not in plan.live]:
                # The group was dropped, and no running sample of it will remove the entry.
                del kept[group]
        if plan.max_staleness is not None:
            self._give_up(self._running)
        self._wake.set()
        self._tell_takers()

    # --- delivery of groups -----------------------------------------------------------------------

    def __aiter__(self) -> AsyncIterator[Group]:
        if self._closed or self._looped:
            raise UsageError(
                "this run has ended; to go on after leaving a loop over it, enter it with 'async "
                "with', or make another run with state=run.state_dict()"
            )
        return self._groups() if self._task is None else self

    async def _groups(self) -> AsyncGenerator[Group, None]:
        self._looped = True
        async with self:
            while found := await self.take(1):
                yield found[0]

    async def __anext__(self) -> Group:
        found = await self.take(1)
        if not found:
            raise StopAsyncIteration
        return found[0]

    async def batches(self) -> AsyncGenerator[list[Group], None]:
        """Yield lists of ``batch_size`` groups. The last list may be shorter.

        Raises:
            UsageError: the run has no ``batch_size``, or was not entered with ``async with``.
        """
        if self.batch_size is None:
            raise UsageError("batches() needs rollout(..., batch_size=)")
        while batch := await self.take(self.batch_size):
            yield batch

    async def take(self, n: int = 1, *, timeout: float | None = None) -> list[Group]:
        """Return the next ``n`` groups.

        Return fewer groups at the end of the data set, and none when there are no more. The ready
        group with the oldest tokens comes first. A cancelled or late call loses nothing: the next
        call returns its groups.

        Raises:
            DeadlineExceeded: fewer than ``n`` groups were ready within ``timeout`` seconds. With
                ``max_staleness``, new groups need new weights now and then.
            Exception: raised by the agent, with on_error="raise".
            UsageError: the run has not begun.
        """
        if type(n) is not int or n < 1:
            raise UsageError(f"take at least 1 group, got {n!r}")
        check_timeout(timeout)
        if self._task is None:
            raise UsageError(
                "the run has not begun; use 'async with run' ('with run', of a blocking client)"
            )
        plan = self._plan
        if plan.ahead < n:
            plan.ahead = n
            self._wake.set()
        if not self._closed and not self._take_ready(n):
            await self._wait_for(n, timeout)
        if self._closed:
            return []
        found, self._partial = self._partial[:n], self._partial[n:]
        return found

    async def _wait_for(self, n: int, timeout: float | None) -> None:
        """Wait for ``n`` groups, or for all remaining groups if there are fewer."""
        plan = self._plan
        assert self._task is not None
        loop = asyncio.get_running_loop()
        hint = loop.call_later(_HINT_SECONDS, self._hint)
        try:
            async with asyncio.timeout(timeout) as limit:
                while not self._closed and not self._take_ready(n):
                    if self._failure is not None:
                        raise self._failure
                    if self._task.done() or (plan.over and not plan.ready):
                        if not self._partial:
                            self._check_end()
                        break
                    self._arrival = loop.create_future()
                    await self._arrival
        except TimeoutError:
            if not limit.expired():
                # The error belongs to an agent or to the data set.
                raise
            ready = len(self._partial) + len(plan.ready)
            raise DeadlineExceeded(
                f"{ready} of {n} groups were ready within {timeout:g} s"
            ) from None
        finally:
            hint.cancel()

    def _check_end(self) -> None:
        """Raise an error if the run has ended for another reason than the end of the data set."""
        if self._failures and not self._successes:
            error = self.errors[-1]
            error.add_note(f"and none of the {self._failures} samples ended well")
            raise error
        if self._items.error is not None:
            raise self._items.error

    def _hint(self) -> None:
        """Warn if a waiting consumer waits for new weights, because it may not know this."""
        plan = self._plan
        states = [worker.state for worker in self._client.workers]
        if "stale" in states and "ready" not in states:
            logger.warning(
                "a rollout waits for new weights: no worker serves, and nobody could give those "
                "that were replaced (%d) the weights of version %d; they serve after the next "
                "update_weights, for which no groups are needed",
                states.count("stale"),
                plan.version,
            )
        bounded = plan.max_staleness is not None and not plan.may_begin()
        if bounded and not self._running and len(plan.ready) < plan.ahead:
            logger.warning(
                "a rollout waits for new weights: with max_staleness=%d and batch_size=%d no more "
                "groups are begun at version %d, until update_weights is called; without training, "
                "leave max_staleness out",
                plan.max_staleness,
                plan.batch_size,
                plan.version,
            )

    def _take_ready(self, n: int) -> bool:
        """Return whether there are ``n`` groups. Take them only then, or at the end."""
        plan = self._plan
        while self._keep is not None and (lessened := plan.next_lessened()) is not None:
            # The group was ready to be kept with samples that it has lost since then.
            if self._keep(self._made(lessened)):
                plan.keep(lessened)
            else:
                plan.filter(lessened)
                self._wake.set()
        while len(self._partial) < n:
            enough = len(self._partial) + len(plan.ready) >= n
            # At the end, take all ready groups. Wait for groups that run or begin again.
            last = plan.exhausted and not plan.again and len(plan.live) == len(plan.ready)
            if not (enough or last):
                break
            group = plan.take()
            if group is None:
                break
            self._wake.set()
            made = self._made(group)
            # Samples and group refer to each other. This saves the garbage collector some work.
            group.samples.clear()
            self._staleness += plan.version - group.oldest
            self._partial.append(made)
        return len(self._partial) >= n

    def _made(self, group: core.Group) -> Group:
        done = group.done
        return Group(
            index=group.index,
            item=group.item,
            trajectories=tuple(sample.result for sample in done),
            failed=self._plan.group_size - len(done),
            version=self._plan.version,
        )

    def _tell_takers(self) -> None:
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    # --- pause, state, metrics --------------------------------------------------------------------

    async def pause(self, *, timeout: float | None = None) -> None:
        """Begin no further turn, and wait until all running turns have ended.

        Then the engines have no work for this run's sessions. Agents wait at their next turn. Tools
        continue, and so do calls that agents make without their session.

        Raises:
            DeadlineExceeded: turns still run after ``timeout`` seconds. The run stays paused.
            UsageError: ``resume`` was called before the turns had ended.
        """
        check_timeout(timeout)
        self._gate.close()
        try:
            async with asyncio.timeout(timeout):
                paused = await self._gate.empty()
                if paused and self._processes is not None:
                    paused = await self._processes.pause()
        except TimeoutError:
            count = "" if self._processes is not None else f"{self._gate.inside} "
            raise DeadlineExceeded(f"{count}turns still run after {timeout:g} s") from None
        if not paused:
            raise UsageError("the run was resumed before its turns had ended, so it is not paused")

    def resume(self) -> None:
        """Continue after ``pause``."""
        self._gate.open()
        if self._processes is not None and self._task is not None and not self._closed:
            self._processes.resume()
        self._wake.set()

    def state_dict(self) -> dict[str, Any]:
        """Return the finished items, for ``rollout(..., state=)`` over the same data set.

        A group counts as finished when it is taken. Running samples run again.
        """
        done, skipped = self._state
        unread = {index for index in skipped if index >= self._items.read}
        if (ahead := self._items.read_ahead) is not None and ahead < done:
            unread.add(ahead)
        begun = {*self._plan.unfinished(), *unread, *(g.index for g in self._partial)}
        return {"next": max(self._plan.next_index, done), "unfinished": sorted(begun)}

    @property
    def concurrency(self) -> int:
        """The current maximum of samples that run at a time."""
        return self._fixed if self._limit is None else self._limit.limit  # type: ignore[return-value]

    @property
    def metrics(self) -> RolloutMetrics:
        """A snapshot of the run's metrics."""
        plan = self._plan
        # Samples that run when the run ends are neither done nor lost.
        runs = self._ended_at is None
        until = self._ended_at or time.monotonic()
        return RolloutMetrics(
            groups_taken=plan.taken,
            groups_filtered=plan.filtered,
            groups_dropped=plan.dropped,
            groups_ready=len(plan.ready),
            groups_running=len(plan.live) - len(plan.ready) if runs else 0,
            samples_done=plan.samples_done,
            samples_running=plan.running if runs else 0,
            samples_retried=plan.retried,
            samples_lost=dict(plan.lost),
            concurrency=self.concurrency,
            turns=self._turns,
            generated_tokens=self._generated_bytes // 4,
            prompt_tokens=self._prompt_bytes // 4,
            cached_tokens=self._cached,
            mean_reward=sum(self._rewards) / len(self._rewards) if self._rewards else math.nan,
            mean_staleness=self._staleness / plan.taken if plan.taken else 0.0,
            seconds=until - self._begun if self._begun else 0.0,
        )

    def _on_turn(self, prompt: int, cached: int, new: int) -> None:
        self._turns += 1
        self._prompt_bytes += prompt
        self._cached += cached
        self._generated_bytes += new

    def _look(self) -> None:
        """Adjust the concurrency after an engine has reported its load."""
        now = time.monotonic()
        if self._limit is not None and now - self._looked >= _LOOK_SECONDS:
            self._looked = now
            loads, queued = self._client._loads()
            if self._limit.look(now, self._plan.running, queued, loads):
                self._wake.set()


def _seed(seed: int, sample: core.Sample) -> int:
    """Return the seed of a sample's first turn. Later turns count up. Each try has another seed."""
    number = ((seed * 1_000_003 + sample.group.index) * 1009 + sample.index) * 1024
    return ((number + sample.tries) * 1024) % (1 << 61)


def _checked_state(state: Mapping[str, Any] | None) -> tuple[int, set[int]]:
    if state is None:
        return 0, set()
    try:
        return int(state["next"]), {int(i) for i in state["unfinished"]}
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"state is not what state_dict() gave: {error!r}") from None
