"""Run the samples of a plan: start them, record their ends, and end the run.

``Plan`` (``core/rollout_plan.py``) decides which samples run and which groups are ready. An
``AgentHost`` runs the agents. The runner begins the plan's samples in the host, and records in the
plan how each sample ends.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from ..control.snapshot import RolloutSnapshot
from ..core import rollout_group as core
from ..core.policy_versions import PolicyClock
from ..errors import Closed, DeadlineExceeded, UsageError, WorkerLost
from ..sessions.live import EndedSample
from ..sessions.trajectory import Trajectory, record_of
from .agent_host import AgentHost, Done, End, Failed, GivenUp, Late, ProcessLost
from .agent_tasks import AgentTasks
from .blocked_loop import LoopWatch
from .config import RolloutConfig
from .dataset import Items
from .delivery import Delivery
from .failures import FailurePolicy, title_of_error
from .lost_weights import UnlessWeightsLost
from .metrics import MetricsRecorder
from .progress import RolloutProgress
from .sample_limit import SampleLimit
from .task_ending import TaskSet

if TYPE_CHECKING:
    from ..client.client import Client

_ERRORS: Final = 3
"""The number of latest errors in a snapshot."""


class Runner:
    """Runs a plan's samples until the plan is over, an error ends the run, or ``stop`` is called.

    Owns the plan and the objects that use it, the host of the agents, and all tasks of the run.
    """

    def __init__(self, client: Client, config: RolloutConfig) -> None:
        self._client = client
        self._config = config
        self._wake = asyncio.Event()
        """Wakes the main task. Set when a sample may be able to start, or when the run ends."""
        wake = self._wake.set
        self.plan = config.plan()
        self.items = Items(config.dataset, config.state, wake)
        self.limit = SampleLimit(client, self.plan, config.concurrency, wake)
        self.failures = FailurePolicy(config, self.limit)
        self.metrics = MetricsRecorder(self.plan, self.limit)
        self.delivery = Delivery(
            client, config.keep, self.plan, self.metrics, self._check_end, on_taken=wake
        )
        self._progress = RolloutProgress(self.items.total, config.progress)
        self._tasks = TaskSet(self._break_off)
        self._main: asyncio.Task[None] | None = None
        self._watch: LoopWatch | None = None
        self._broken: BaseException | None = None
        """An error that ends the run and arose outside the main task."""
        self._stopping = False
        """Whether the run is ending for another reason than the end of the data set."""
        self.host: AgentHost
        count_turns, on_end = self.metrics.count_turns, self._sample_ended
        if config.processes is None:
            self.host = AgentTasks(client, config, self._tasks, count_turns, on_end)
        else:
            # Imported here because it imports the transport, which ``rollouts`` need not import.
            from .agent_processes import AgentProcesses

            self.host = AgentProcesses(client, config, count_turns, on_end, on_room=wake)

    # --- start and end ----------------------------------------------------------------------------

    @property
    def begun(self) -> bool:
        return self._main is not None

    async def start(self) -> None:
        """Start the host, then the samples.

        Raises:
            Closed: ``stop`` was called meanwhile.
            Exception: the agent cannot be made ready.
        """
        try:
            await self.host.start()
            if self._stopping:
                raise Closed("the run was closed while it started")
            self.limit.begin()
            weights = self._client.pool.weights
            self.plan.clock = PolicyClock(self._client.policy_versions)
            weights.on_version.add(self._on_version)
            self.metrics.begin()
            self._client.observed.rollouts.append(self.snapshot)
            self._progress.begin()
            self._watch = LoopWatch(lambda: self.plan.running > 0)
            self._main = asyncio.create_task(self._run(), name="sglrl rollout")
        except BaseException:
            await self.host.close()
            raise

    async def stop(self) -> None:
        """Cancel the running samples. Wait until all tasks have ended. Safe to call again."""
        self._stopping = True
        try:
            if self._main is not None:
                self._main.cancel()
                if self.snapshot in self._client.observed.rollouts:
                    self._client.observed.rollouts.remove(self.snapshot)
                self._client.pool.weights.on_version.discard(self._on_version)
                self.limit.end()
                # Do not raise the exception of the task. ``take`` raises it for consumers.
                await asyncio.wait([self._main])
        finally:
            await self.host.close()
            self._end_watch()
            if self._main is not None:
                self.metrics.end()
                self._progress.end(self.metrics.snapshot())

    def snapshot(self) -> RolloutSnapshot:
        """Return the state of the run, for ``Client.snapshot``."""
        return RolloutSnapshot(
            metrics=self.metrics.snapshot(),
            staleness=dict(sorted(self.metrics.staleness.items())),
            items=self.items.total,
            group_size=self._config.group_size,
            batch_size=self._config.batch_size,
            max_staleness=self._config.max_staleness,
            errors=self.failures.most_frequent(_ERRORS),
        )

    def _end_watch(self) -> None:
        if self._watch is not None:
            self._watch.close()

    async def pause(self, timeout: float | None) -> None:
        """See ``Rollout.pause``."""
        host = self.host
        try:
            async with UnlessWeightsLost(self._client), asyncio.timeout(timeout):
                paused = await host.pause()
        except TimeoutError:
            count = "" if host.turns_running is None else f"{host.turns_running} "
            raise DeadlineExceeded(f"{count}turns still run after {timeout:g} s") from None
        if not paused:
            raise UsageError("the run was resumed before its turns had ended, so it is not paused")

    def resume(self) -> None:
        self.host.resume()
        self._wake.set()

    async def _run(self) -> None:
        try:
            try:
                await self._run_samples()
            except BaseException:
                self._stopping = True
                self.host.stop()
                self._tasks.cancel_all()
                raise
            finally:
                await self._tasks.ended()
        except BaseException as failure:
            self.delivery.fail(failure)
            if isinstance(failure, asyncio.CancelledError):
                raise
        finally:
            self._end_watch()
            self.metrics.end()
            self.failures.log_totals(self.plan)
            self.delivery.notify()

    async def _run_samples(self) -> None:
        while not self.plan.over:
            self._wake.clear()
            self._fill()
            if self._broken is None:
                await self._wake.wait()
            if self._broken is not None:
                raise self._broken

    def _break_off(self, error: BaseException) -> None:
        """End the run with an error."""
        self._stopping = True
        self._broken = self._broken or error
        self._wake.set()

    def _check_end(self) -> None:
        """Raise an error if no sample was successful, or if the data set has failed."""
        self.failures.check_end()
        if self.items.error is not None:
            raise self.items.error

    def state_dict(self) -> dict[str, Any]:
        """See ``Rollout.state_dict``."""
        return self.items.state_dict(self.plan.next_index, self.delivery.unfinished)

    @property
    def _is_ending(self) -> bool:
        """Whether the whole run is ending, and not only one sample."""
        return self._stopping or (self._main is not None and self._main.cancelling() > 0)

    # --- start of samples -------------------------------------------------------------------------

    def _fill(self) -> None:
        """Start samples while the limit, the plan and the data set allow it."""
        plan, items = self.plan, self.items
        while not self.host.paused and plan.running < self.limit.value:
            sample = plan.start(suspect=bool(plan.suspects) and self.host.room_for_suspect)
            if sample is not None:
                self._start(sample)
                continue
            if not plan.may_begin():
                if plan.max_staleness is not None:
                    # A consumer that waits for a group must know whether another group will come.
                    items.request_next(self._tasks.begin)
                break
            if plan.begin_again():
                continue
            item = items.take(self._tasks.begin)
            if item is None:
                break
            plan.begin(*item)
        if items.exhausted and not plan.exhausted:
            plan.exhausted = True
            # Postponed groups may begin when the data set is exhausted.
            self._wake.set()
            self.delivery.notify()
        if plan.ending:
            # A consumer may wait for more groups than there will be.
            self.delivery.notify()
        if plan.over:
            self._wake.set()

    def _start(self, sample: core.Sample) -> None:
        try:
            self.host.begin(sample, self.plan.clock.versions)
        except Exception as error:
            self._failed(sample, error)

    # --- ends of samples --------------------------------------------------------------------------

    def _sample_ended(self, sample: core.Sample, end: End) -> None:
        self._client.observed.ended.add(functools.partial(_ended, sample, end))
        if self._is_ending and not isinstance(end, Done | GivenUp):
            # An exception after the cancellation is not a failure of the agent.
            return
        try:
            match end:
                case Done(trajectory):
                    self._done(sample, trajectory)
                case Failed(error, fatal):
                    self._failed(sample, error, fatal)
                case Late(error):
                    self.failures.count_late(error, sample)
                    self._lost(sample, "timeout")
                case GivenUp(reason):
                    self._lost(sample, reason)
                case ProcessLost(lost):
                    self._process_lost(sample, lost)
        except BaseException as error:
            self._break_off(error)

    def _done(self, sample: core.Sample, trajectory: Trajectory) -> None:
        self.failures.count_success()
        self.metrics.count_reward(trajectory.reward)
        ready = self.plan.done(sample, trajectory, trajectory.oldest_versions)
        self._settle(sample.group, ready)

    def _failed(self, sample: core.Sample, error: Exception, fatal: bool = False) -> None:
        retry = self.failures.count_failure(error, sample, fatal=fatal or self._is_hopeless)
        self._lost(sample, "error", retry=retry, final=not retry)

    def _lost(
        self, sample: core.Sample, reason: str, *, retry: bool = False, final: bool = False
    ) -> None:
        ready = self.plan.failed(sample, reason, retry=retry, final=final)
        self._settle(sample.group, ready)

    def _process_lost(self, sample: core.Sample, error: WorkerLost) -> None:
        if self._is_hopeless:
            self._failed(sample, error)
        elif self.plan.interrupted(sample):
            self.failures.record(error)
            self._changed()
        else:
            error.add_note(f"this sample has now lost its process {core.MAX_LOSSES + 1} times")
            self.failures.count_failure(error, sample, fatal=False)
            self.plan.condemned(sample, "error")
            self._settle(sample.group, None)

    @property
    def _is_hopeless(self) -> bool:
        """Whether no other sample could get a turn, because the client or the host has ended."""
        return not self._client.is_alive or not self.host.alive

    def _settle(self, group: core.Group, ready: core.Group | None) -> None:
        """Handle the end of a sample of ``group``.

        Args:
            ready: the group, if this sample has completed it, otherwise None.
        """
        if ready is not None:
            self.delivery.arrived(ready)
        if group.state is not core.RUNNING:
            self.host.forget(group)
            if group.state in (core.DROPPED, core.POSTPONED):
                self._give_up(group.samples)
        self._changed()

    def _changed(self) -> None:
        self._log_too_slow()
        self._progress.show(self.metrics.snapshot)
        self._wake.set()

    def _on_version(self) -> None:
        plan = self.plan
        live = list(plan.live)
        plan.advance(self._client.policy_versions)
        for group in live:
            if group not in plan.live:
                # The new version made the plan drop or postpone the group.
                self.host.forget(group)
            if plan.max_staleness is not None:
                self._give_up(group.samples)
        self._log_too_slow()
        self._wake.set()
        self.delivery.notify()

    def _log_too_slow(self) -> None:
        while self.plan.too_slow:
            self.failures.log_too_slow(self.plan.too_slow.popleft(), self.plan)

    def _give_up(self, samples: Iterable[core.Sample]) -> None:
        """Cancel each of the samples that is running but no longer useful."""
        for sample in samples:
            if sample.state is core.RUNNING and self.plan.is_stale(
                sample, self.host.oldest_versions(sample)
            ):
                alive = sample.group.state is core.RUNNING
                self.host.give_up(sample, core.STALE if alive else core.GIVEN_UP)


def _ended(sample: core.Sample, end: End) -> EndedSample:
    """Describe the end of a sample, for programs that watch the run."""
    error, record = "", None
    match end:
        case Done(trajectory):
            record = record_of(trajectory)
        case GivenUp(reason, so_far):
            error, record = reason, so_far()
        case Failed(failure, _, so_far) | Late(failure, so_far):
            error, record = title_of_error(failure), so_far()
        case ProcessLost(failure):
            error = title_of_error(failure)
    return EndedSample(
        item=sample.group.index,
        sample=sample.index,
        error=error,
        trajectory=record,
        ended=time.time(),
    )
