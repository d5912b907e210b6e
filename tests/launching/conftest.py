"""After each test, check that its loop has no task, and that no worker or pool folder remains."""

from leftovers import no_task_is_left, no_worker_is_left

__all__ = ["no_task_is_left", "no_worker_is_left"]
