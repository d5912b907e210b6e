"""Deliver the ready groups of a run to its consumers, and log why a consumer waits for long."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from ..core import rollout_group as core
from ..core.policy_versions import MODEL
from ..core.rollout_plan import Plan
from ..errors import DeadlineExceeded
from .group import Group
from .lost_weights import UnlessWeightsLost
from .metrics import MetricsRecorder

if TYPE_CHECKING:
    from ..client.client import Client

logger = logging.getLogger("sglrl.rollout")

_HINT_SECONDS: Final = 10.0
"""Seconds between two checks of why a consumer waits. Each check logs a new reason."""
_FIRST_GROUPS: Final = "first groups"
"""The reason to wait that is logged only before the first groups were taken."""


class Delivery:
    """Takes ready groups from the plan for the consumers, and serves one consumer after the other.

    Owns the waiting consumers, and the groups that were taken for an unfinished ``take``.

    Args:
        keep: returns False to filter out a finished group. None: all groups are delivered.
        check_end: called when there are no more groups. Raises an error if no sample was
            successful, or if the data set has failed.
        on_taken: called when more groups may begin.
    """

    def __init__(
        self,
        client: Client,
        keep: Callable[[Group], bool] | None,
        plan: Plan,
        metrics: MetricsRecorder,
        check_end: Callable[[], None],
        on_taken: Callable[[], None],
    ) -> None:
        self._client = client
        self._keep = keep
        self._plan = plan
        self._metrics = metrics
        self._check_end = check_end
        self._on_taken = on_taken
        self._partial: list[Group] = []
        self._turn = asyncio.Lock()
        """The lock of the consumer that gets the next groups. Other consumers wait in order."""
        self._arrival: asyncio.Future[None] | None = None
        self._hint_timer: asyncio.TimerHandle | None = None
        self._hinted: set[str] = set()
        """The reasons to wait that were logged since the last groups were taken."""
        self._failure: BaseException | None = None
        self._closed = False

    @property
    def unfinished(self) -> set[int]:
        """The indices of items that have begun, except those delivered, filtered out or dropped."""
        return {*self._plan.unfinished(), *(group.index for group in self._partial)}

    # --- called by the runner ---------------------------------------------------------------------

    def arrived(self, group: core.Group) -> None:
        """Notify the consumer of a ready group, or filter the group out if ``keep`` rejects it."""
        if self._keep is None or self._keep(self._made(group)):
            self.notify()
        else:
            self._plan.filter(group)

    def notify(self) -> None:
        """Wake a waiting consumer, so that it checks the plan again."""
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    def fail(self, failure: BaseException) -> None:
        """Record the failure that has ended the run. ``take`` raises it if groups are missing."""
        self._failure = failure
        self.notify()

    def close(self) -> None:
        """Let ``take`` return no more groups. Call ``notify`` afterwards."""
        self._closed = True

    # --- called by the consumer -------------------------------------------------------------------

    async def take(self, n: int, timeout: float | None) -> list[Group]:
        """See ``Rollout.take``."""
        try:
            async with asyncio.timeout(timeout) as limit, self._turn:
                if not self._closed and not self._take_ready(n):
                    await self._wait_for(n)
                if self._closed:
                    return []
                groups, self._partial = self._partial[:n], self._partial[n:]
                if groups:
                    self._hinted = {_FIRST_GROUPS}
                    self._metrics.count_delivery()
                return groups
        except TimeoutError:
            if not limit.expired():
                # The error belongs to an agent or to the data set.
                raise
            ready = len(self._partial) + len(self._plan.ready)
            raise DeadlineExceeded(
                f"{ready} of {n} groups were ready within {timeout:g} s"
            ) from None

    async def _wait_for(self, n: int) -> None:
        """Wait for ``n`` groups, or for all remaining groups if there are fewer."""
        loop = asyncio.get_running_loop()
        self._hint_timer = loop.call_later(_HINT_SECONDS, self._hint)
        self._plan.wanted = n
        self._on_taken()
        try:
            while not self._closed and not self._take_ready(n):
                if self._failure is not None:
                    raise self._failure
                if self._plan.over:
                    if not self._partial:
                        self._check_end()
                    break
                self._arrival = loop.create_future()
                async with UnlessWeightsLost(self._client):
                    await self._arrival
        finally:
            self._plan.wanted = 0
            self._hint_timer.cancel()

    def _hint(self) -> None:
        """Log why a consumer waits, if the reason is new. Schedule the next check."""
        loop = asyncio.get_running_loop()
        self._hint_timer = loop.call_later(_HINT_SECONDS, self._hint)
        plan = self._plan
        states = [worker.state for worker in self._client.workers]
        if not {"ready", "stale"} & {*states} and self._is_new("workers"):
            logger.warning(
                "a rollout waits for a worker to start; the states of the workers are: %s",
                ", ".join(states) or "none",
            )
        if plan.needs_weights() and not plan.running and self._is_new("weights"):
            used = plan.clock.used
            named = [
                f"version {used.pop(MODEL)}",
                *(f"{v} of {name!r}" for name, v in used.items()),
            ]
            logger.warning(
                "a rollout waits for new weights: with max_staleness=%d and batch_size=%d no "
                "further group begins at %s; call update_weights, or leave max_staleness "
                "out if there is no training",
                plan.max_staleness,
                plan.batch_size,
                ", ".join(named),
            )
        elif "ready" in states and plan.running and self._is_new(_FIRST_GROUPS):
            logger.warning(
                "a rollout waits for its first groups: %d samples run, of %d groups of up to %d "
                "samples each, and %d groups are ready of the %d that are wanted",
                plan.running,
                len(plan.live) - len(plan.ready),
                plan.group_size,
                len(plan.ready),
                plan.wanted,
            )

    def _is_new(self, reason: str) -> bool:
        """Return whether a reason to wait was not logged yet, and record it as logged."""
        new = reason not in self._hinted
        self._hinted.add(reason)
        return new

    def _take_ready(self, n: int) -> bool:
        """Take ready groups if there are ``n``, or if the run ends. Return whether ``n`` are held.

        ``_partial`` holds the taken groups.
        """
        plan = self._plan
        self._filter_lessened()
        while len(self._partial) < n:
            enough = len(self._partial) + len(plan.ready) >= n
            # When the run is ending, take all ready groups, also if there are fewer than n.
            if not (enough or plan.ending):
                break
            group = plan.take()
            if group is None:
                break
            self._on_taken()
            made = self._made(group)
            # Samples and group refer to each other. Break the cycle for the garbage collector.
            group.samples.clear()
            self._metrics.count_taken(made)
            self._partial.append(made)
        return len(self._partial) >= n

    def _filter_lessened(self) -> None:
        """Call ``keep`` again for ready groups that have lost samples since the first call."""
        plan = self._plan
        while self._keep is not None and (group := plan.next_lessened()) is not None:
            if self._keep(self._made(group)):
                plan.keep(group)
            else:
                plan.filter(group)
                self._on_taken()

    def _made(self, group: core.Group) -> Group:
        done, now = group.done, self._plan.clock.versions
        stale = sum(sample.lost_by == core.STALE for sample in group.samples)
        sampled = {name for sample in done for name in sample.oldest} & now.keys() - {MODEL}
        return Group(
            index=group.index,
            item=group.item,
            trajectories=tuple(sample.result for sample in done),
            failed=self._plan.group_size - len(done) - stale,
            stale=stale,
            version=self._plan.version,
            lora_versions={name: now[name] for name in sorted(sampled)},
        )
