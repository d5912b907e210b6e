"""Agent loops: run one coroutine per sample, thousands at a time, and deliver groups.

* ``runner``: ``sglrl.rollout`` runs an agent over a data set; ``core/rollout_plan.py`` decides;
* ``dataset``: reads the items;
* ``agent``, ``task_ending``: one sample, and agents that do not end;
* ``agent_processes``, ``agent_worker``, ``agent_messages``: agents in processes of their own;
* ``group``, ``failures``, ``progress``: results, the log of failures, and progress.
"""

from ..sessions.session import Session
from ..sessions.tensors import stack
from ..sessions.trajectory import Trajectory, TrajectoryTiming, Turn
from ..sessions.trajectory_files import load, save
from .dataset import session_arguments
from .group import Group, RolloutMetrics
from .runner import Rollout, rollout

__all__ = [
    "Group",
    "Rollout",
    "RolloutMetrics",
    "Session",
    "Trajectory",
    "TrajectoryTiming",
    "Turn",
    "load",
    "rollout",
    "save",
    "session_arguments",
    "stack",
]
