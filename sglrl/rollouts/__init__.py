"""Agent loops: run one coroutine per sample, thousands at a time, and deliver groups.

* ``run``, ``config``: ``sglrl.rollout``, and its arguments;
* ``runner``: starts the samples; ``core/rollout_plan.py`` decides which ones;
* ``agent_host``: the interface to the place where agents run;
* ``agent_tasks``, ``task_ending``: agents in this process, and agents that do not end;
* ``agent_processes``, ``agent_worker``, ``agent_messages``: agents in processes of their own;
* ``agent``: one sample, in any process;
* ``dataset``, ``fingerprint``, ``state_file``: the items, and which of them are finished;
* ``sample_limit``: the number of samples that run at a time;
* ``delivery``, ``group``: ready groups on their way to the consumer;
* ``failures``, ``metrics``, ``progress``: what failed samples lead to, and counts.
"""

from ..sessions.session import Session
from ..sessions.tensors import stack
from ..sessions.trajectory import Trajectory
from ..sessions.trajectory_files import load, save, to_jsonl
from ..sessions.turn import TrajectoryTiming, Turn
from .dataset import session_arguments
from .group import Group
from .metrics import Distribution, RolloutMetrics, StepMetrics
from .run import Rollout, rollout

__all__ = [
    "Distribution",
    "Group",
    "Rollout",
    "RolloutMetrics",
    "Session",
    "StepMetrics",
    "Trajectory",
    "TrajectoryTiming",
    "Turn",
    "load",
    "rollout",
    "save",
    "session_arguments",
    "stack",
    "to_jsonl",
]
