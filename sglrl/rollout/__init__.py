"""Agent loops: write one conversation as a coroutine, run thousands, get what a trainer needs.

* ``session``: one conversation, token in and token out;
* ``template``: what a chat template puts behind the model's own tokens;
* ``trajectory``, ``files``, ``tensors``: what is left of it, as arrays, on disk and as tensors;
* ``runner``: ``sglrl.rollout``, an agent over a data set; ``core/rollout_plan.py`` decides for it;
* ``gate``, ``progress``: pausing a run, and showing it.
"""

from .files import load, save
from .group import Group, RolloutMetrics
from .items import session_arguments
from .runner import Rollout, rollout
from .session import Session
from .tensors import stack
from .trajectory import Trajectory, TrajectoryTiming, Turn

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
