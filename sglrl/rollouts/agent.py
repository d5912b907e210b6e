"""One sample of a run: the agent over its session, in whatever process that is."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from ..errors import DeadlineExceeded, SglrlError, UsageError
from ..sessions.session import Session
from ..sessions.trajectory import Trajectory
from .task_ending import Limit

Agent = Callable[[Session, Any], Awaitable[Any]]


class NotAsync(UsageError):
    """The agent is no coroutine function: no sample can end well."""


@asynccontextmanager
async def made_ready(agent: Agent | type[Any]) -> AsyncGenerator[Agent, None]:
    """An agent that was given as a class, or as a ``functools.partial`` of one: an instance of it,
    which is entered if it is a context manager. Any other as it is."""
    made_of = agent.func if isinstance(agent, functools.partial) else agent
    async with AsyncExitStack() as stack:
        if not isinstance(made_of, type):
            yield agent
            return
        try:
            instance: Any = agent()  # type: ignore[call-arg]
        except TypeError as error:
            error.add_note(
                "of an agent that is a class an instance is made without arguments; give "
                f"functools.partial({made_of.__name__}, ...) for some"
            )
            raise
        # As with any manager, what it returns is what counts.
        if hasattr(instance, "__aenter__"):
            instance = await stack.enter_async_context(instance)
        elif hasattr(instance, "__enter__"):
            instance = stack.enter_context(instance)
        if not callable(instance):
            raise UsageError(
                f"what {made_of.__name__} makes cannot be called, so it is no agent: it is a "
                f"{type(instance).__name__}"
            )
        yield instance


async def play(agent: Agent, session: Session, item: Any, limit: Limit | None) -> Trajectory:
    """What the agent makes of the item. ``limit`` is entered here.

    Raises:
        NotAsync: see there.
        TimeoutError: it is late, and went on; ``is_late`` says so.
        UsageError: what it returned is neither a reward nor a trajectory.
        BaseException: of the agent.
    """
    made = agent(session, item)
    if not inspect.isawaitable(made):
        raise NotAsync(f"the agent must be async: it returned {made!r:.100}")
    if limit is None:
        result = await made
    else:
        async with limit:
            result = await made
            if is_late(limit):
                # It has held up the loop, or was told and went on.
                raise TimeoutError
    return _trajectory(session, result)


def is_late(limit: Limit | None) -> bool:
    """Whether its time is over, also while nobody could be told so."""
    if limit is None:
        return False
    at = limit.when()
    return limit.expired() or (at is not None and asyncio.get_running_loop().time() >= at)


def too_late(timeout: float | None, error: BaseException | None) -> DeadlineExceeded:
    """For an agent that took longer than ``timeout``, whatever it has made of its cancellation."""
    late = DeadlineExceeded(f"the agent took longer than {timeout:g} s (timeout)")
    late.__cause__ = error
    return late


def as_failure(error: BaseException) -> Exception:
    """Of an agent that nobody has cancelled: what its sample has failed with."""
    if isinstance(error, asyncio.CancelledError):
        failure = SglrlError("the agent was cancelled by something that it awaited")
    elif isinstance(error, SystemExit):
        failure = SglrlError(f"the agent tried to leave the program, with {error.code!r}")
    elif isinstance(error, Exception):
        return error
    else:
        failure = SglrlError(f"the agent raised {error!r:.200}")
    failure.__cause__ = error
    return failure


def _trajectory(session: Session, result: Any) -> Trajectory:
    if isinstance(result, Trajectory):
        if result.oldest_version < 0:
            raise UsageError("the agent returned a trajectory in which nothing was sampled")
        return result
    if result is None:
        if not session.rewarded:
            raise UsageError("the agent returned None; return its reward, or call session.reward")
        return session.trajectory()
    if isinstance(result, (str, bytes)) or not hasattr(result, "__float__"):
        raise UsageError(
            f"the agent must return its reward or a Trajectory, got {type(result).__name__}"
        )
    return session.trajectory(result)
