"""The interface between a run and the host that runs its agents.

``AgentTasks`` runs agents as tasks of this event loop. ``AgentProcesses`` runs them in other
processes. The run begins samples, and the host reports one ``End`` for each of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from ..core.policy_versions import Versions
from ..core.rollout_group import Group, Sample
from ..errors import WorkerLost
from ..sessions.record import Record
from ..sessions.trajectory import Trajectory


class Done(NamedTuple):
    """The agent has finished its sample."""

    trajectory: Trajectory


SoFar = Callable[[], Record | None]
"""Returns the turns of a sample that was not finished, or None without turns."""


def _unknown() -> Record | None:
    return None


class Failed(NamedTuple):
    """The agent has failed.

    Attributes:
        fatal: whether the run must end, because every other sample would fail in the same way.
        so_far: for programs that watch the run.
    """

    error: Exception
    fatal: bool = False
    so_far: SoFar = _unknown


class Late(NamedTuple):
    """The agent has taken longer than its time limit."""

    error: Exception
    so_far: SoFar = _unknown


class GivenUp(NamedTuple):
    """The sample was cancelled because it is no longer useful.

    Attributes:
        reason: ``STALE`` or ``GIVEN_UP`` of ``core/rollout_group.py``.
    """

    reason: str
    so_far: SoFar = _unknown


class ProcessLost(NamedTuple):
    """The sample's process was lost, for a reason that the sample may not have caused."""

    error: WorkerLost


End = Done | Failed | Late | GivenUp | ProcessLost
OnEnd = Callable[[Sample, End], None]


class AgentHost(Protocol):
    """Runs the agents of one run."""

    @property
    def alive(self) -> bool:
        """Whether the host can still run samples."""

    @property
    def paused(self) -> bool:
        """Whether the host is paused, so that no turn may begin."""

    @property
    def room_for_suspect(self) -> bool:
        """Whether a process runs no suspect, so one may begin (``core/rollout_group.SUSPECT``)."""

    @property
    def turns_running(self) -> int | None:
        """Number of turns that are being sampled, or None if this process does not know it."""

    async def start(self) -> None:
        """Prepare the agent."""

    async def close(self) -> None:
        """Release the agent. Safe to call again, and while ``start`` runs."""

    def begin(self, sample: Sample, versions: Versions) -> None:
        """Begin a sample.

        Args:
            versions: the policy versions that the run has used for its plan.

        Raises:
            Exception: the sample cannot begin. Its end is not reported.
        """

    def oldest_versions(self, sample: Sample) -> Versions:
        """Return, for each policy, the oldest version that has sampled a token of the sample.

        The result is empty before the first token, or if this process does not know the versions.
        """

    def give_up(self, sample: Sample, reason: str) -> None:
        """Cancel a running sample, and report ``GivenUp`` later. Safe to call again."""

    def stop(self) -> None:
        """End all turns, because the run is ending. Samples that still run need no report."""

    def forget(self, group: Group) -> None:
        """Drop the data that is kept for a group, because none of its samples will begin again."""

    async def pause(self) -> bool:
        """Let no turn begin, and wait until no turn runs. Return False if resumed meanwhile."""

    def resume(self) -> None:
        """Let turns begin again."""
