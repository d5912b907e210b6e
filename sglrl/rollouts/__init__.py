"""Run an agent, one coroutine per sample, over a data set, and deliver groups of trajectories.

* ``run``, ``config``: ``sglrl.rollout``, and its arguments;
* ``runner``: starts the samples; ``core/rollout_plan.py`` decides which ones;
* ``agent_host``: the interface to the place where agents run;
* ``agent_tasks``, ``task_ending``: agents in this process, and agents that do not end;
* ``agent_processes``, ``agent_worker``, ``agent_messages``: agents in separate processes;
* ``agent``: the run of one sample, in any process;
* ``dataset``, ``fingerprint``, ``state_file``: the items of the data set, and the saved progress;
* ``sample_limit``: the number of samples that run at a time;
* ``delivery``, ``group``: the delivery of ready groups to the consumer;
* ``failures``, ``metrics``, ``progress``: the handling of failed samples, and the run's statistics.
"""

from ..core.rollout_metrics import Distribution, RolloutMetrics, StepMetrics
from ..sessions.parquet_file import to_parquet
from ..sessions.session import Session
from ..sessions.tensors import stack
from ..sessions.trajectory import Trajectory
from ..sessions.trajectory_files import iter_load, load, save, to_jsonl
from ..sessions.turn import TrajectoryTiming, Turn
from .dataset import session_arguments
from .group import Group
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
    "iter_load",
    "load",
    "rollout",
    "save",
    "session_arguments",
    "stack",
    "to_jsonl",
    "to_parquet",
]
