"""End tasks that continue after their cancellation.

An agent may swallow ``CancelledError``, once or every time. After its cancellation it has
``GRACE_SECONDS`` to end. Then its coroutine is closed, and no code waits for its task any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import traceback
from collections.abc import Callable, Coroutine, Iterator
from types import FrameType
from typing import Any, Final, Protocol, Self

logger = logging.getLogger("sglrl.rollout")

GRACE_SECONDS: float = 5.0
"""Seconds within which a cancelled agent must end."""
_STEPS: Final = 5
"""The number of steps of the grace period.

An agent cannot end while the event loop is blocked, so a blocked time counts as at most one step.
"""
_WITHOUT_AGENT: Final = ("agent_tasks.py", "agent_worker.py", "agent.py", "task_ending.py")
"""The files of this package whose frames come before the agent's frames in a stack."""

_ENDED: Final = "the run has ended"
"""The reason for cancelling tasks when the run ends. Other reasons are those of lost samples."""


class Owner(Protocol):
    """The object that a task of a ``TaskSet`` works for."""

    @property
    def title(self) -> str:
        """The name of the task in a log."""

    def abandoned(self, reason: str) -> None:
        """Continue without the task, which was cancelled for ``reason`` and has not ended."""


class TaskSet:
    """The tasks of a run, which end with the run.

    A cancelled task that does not end in its grace period is abandoned: its stack is logged, and no
    code waits for it any more.

    Args:
        on_error: called with an exception that a task raises.
    """

    def __init__(self, on_error: Callable[[BaseException], None]) -> None:
        self._on_error = on_error
        self._alive: dict[asyncio.Task[None], Owner] = {}
        """The tasks that have not ended."""
        self._all_ended: asyncio.Future[None] | None = None

    def begin(self, work: Coroutine[Any, Any, None], owner: Owner) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._alive[task] = owner
        task.add_done_callback(self._ended)
        return task

    def cancel(self, task: asyncio.Task[None], reason: str) -> None:
        task.cancel()
        Grace(task, functools.partial(self.abandon, task, reason))

    def cancel_all(self) -> None:
        for task in list(self._alive):
            self.cancel(task, _ENDED)

    def abandon(self, task: asyncio.Task[None], reason: str) -> None:
        """Continue without a cancelled task, unless it has ended."""
        if task.done() or task not in self._alive:
            return
        owner = self._alive.pop(task)
        log_hanging(owner.title, reason, stack_of(task))
        owner.abandoned(reason)
        end_without(task)
        self._notify()

    async def ended(self) -> None:
        """Wait until all tasks have ended or are abandoned.

        Call it when the tasks were cancelled or are about to end. If this call is cancelled, it
        cancels the tasks and continues to wait.
        """
        cancelled: asyncio.CancelledError | None = None
        while self._alive:
            self._all_ended = asyncio.get_running_loop().create_future()
            try:
                await self._all_ended
            except asyncio.CancelledError as error:
                cancelled = error
                self.cancel_all()
        if cancelled is not None:
            raise cancelled

    def _ended(self, task: asyncio.Task[None]) -> None:
        if task not in self._alive:
            # The task was abandoned.
            return
        del self._alive[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_error(error)
        self._notify()

    def _notify(self) -> None:
        if not self._alive and self._all_ended is not None and not self._all_ended.done():
            self._all_ended.set_result(None)


class Grace:
    """Calls ``on_over`` if a cancelled task has not ended after ``GRACE_SECONDS``."""

    def __init__(self, task: asyncio.Task[Any], on_over: Callable[[], None]) -> None:
        self._on_over = on_over
        self._left = _STEPS
        self._loop = task.get_loop()
        self._timer = self._begin_step()
        task.add_done_callback(self._ended)

    def _begin_step(self) -> asyncio.TimerHandle:
        return self._loop.call_later(GRACE_SECONDS / _STEPS, self._step)

    def _step(self) -> None:
        self._left -= 1
        if self._left:
            self._timer = self._begin_step()
        else:
            self._on_over()

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._timer.cancel()


class Limit:
    """``asyncio.timeout`` for the current task, followed by a grace period.

    Args:
        on_over: called if the task has not ended by the end of the grace period.
    """

    def __init__(self, seconds: float, on_over: Callable[[], None]) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._timeout = asyncio.timeout(seconds)
        self._on_over = on_over
        self._timer: asyncio.TimerHandle | None = None

    def when(self) -> float | None:
        return self._timeout.when()

    def expired(self) -> bool:
        return self._timeout.expired()

    def reschedule(self, when: float | None) -> None:
        self._timeout.reschedule(when)
        self._watch()

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        self._watch()
        return self

    async def __aexit__(self, *exc: Any) -> None:
        self._cancel_timer()
        await self._timeout.__aexit__(*exc)

    def _watch(self) -> None:
        self._cancel_timer()
        when = self._timeout.when()
        if when is not None:
            self._timer = self._task.get_loop().call_at(when, self._is_over)

    def _is_over(self) -> None:
        self._timer = None
        Grace(self._task, self._on_over)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def end_without(task: asyncio.Task[Any]) -> None:
    """Close the coroutine of a task that does not end, so that nothing waits for the task.

    As in garbage collection, ``GeneratorExit`` is raised where the coroutine waits, so its
    ``finally`` blocks run. If the coroutine swallows this exception, or waits in a ``finally``
    block, it is abandoned. ``asyncio.run`` does not wait for the task, and asyncio does not log the
    destruction of the task.
    """
    coroutine: Any = task.get_coro()
    with contextlib.suppress(Exception):
        coroutine.close()
    # The next step of the task fails because its coroutine is closed. Ignore this result.
    task.add_done_callback(_collect)
    task.cancel()
    asyncio._unregister_task(task)
    task._log_destroy_pending = False  # type: ignore[attr-defined]


def _collect(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()


def stack_of(task: asyncio.Task[Any]) -> str:
    """Return the formatted stack of a waiting task, from the agent's first frame on.

    The stack includes the coroutines that the task's coroutine awaits. ``Task.get_stack`` returns
    only the outermost frame.
    """
    frames = [*_frames(task.get_coro())]
    agents = next((i for i, frame in enumerate(frames) if not _is_ours(frame)), 0)
    stack = traceback.StackSummary.extract((f, f.f_lineno) for f in frames[agents:])
    return "".join(stack.format()).rstrip()


def _frames(awaited: Any) -> Iterator[FrameType]:
    while awaited is not None:
        for kind in ("cr", "gi", "ag"):
            frame = getattr(awaited, f"{kind}_frame", None)
            if frame is not None:
                yield frame
        inners = (getattr(awaited, name, None) for name in ("cr_await", "gi_yieldfrom", "ag_await"))
        awaited = next((inner for inner in inners if inner is not None), None)


def _is_ours(frame: FrameType) -> bool:
    folder, _, name = frame.f_code.co_filename.rpartition("/")
    return folder == __file__.rpartition("/")[0] and name in _WITHOUT_AGENT


def log_hanging(what: str, reason: str, stack: str) -> None:
    """Log a cancelled task that has not ended, and where it waits."""
    logger.error(
        "%s was cancelled (%s) and did not end within %g s; the run continues without it. It "
        "waits here:\n%s",
        what,
        reason,
        GRACE_SECONDS,
        stack,
    )


def title_of(agent: Any, sample: int, item: int) -> str:
    """Return the title of a sample for a log, with the name of the agent's function or class."""
    return f"agent {name_of(agent)} with sample {sample} of item {item}"


def name_of(agent: Any) -> str:
    """Return the name of the agent's function or class."""
    while isinstance(agent, functools.partial):
        agent = agent.func
    made_of = agent if hasattr(agent, "__qualname__") else type(agent)
    return f"{made_of.__module__}.{made_of.__qualname__}"
