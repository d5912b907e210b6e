"""One sample of a run: the agent over its session, in whatever process that is."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from ..errors import DeadlineExceeded, SglrlError, UsageError
from .session import Session
from .trajectory import Trajectory

Agent = Callable[[Session, Any], Awaitable[Any]]


class NotAsync(UsageError):
    """The agent is no coroutine function: no sample can end well."""


@asynccontextmanager
async def made_ready(agent: Agent | type[Any]) -> AsyncGenerator[Agent, None]:
    """An agent that was given as a class: an instance of it, which is entered if it is an async
    context manager. Any other as it is."""
    async with AsyncExitStack() as stack:
        if not isinstance(agent, type):
            yield agent
            return
        instance = agent()
        if hasattr(instance, "__aenter__"):
            # As with any manager, what it returns is what counts.
            instance = await stack.enter_async_context(instance)
        if not callable(instance):
            raise UsageError(f"an instance of {agent.__name__} cannot be called, so it is no agent")
        yield instance


async def play(
    agent: Agent, session: Session, item: Any, limit: asyncio.Timeout | None
) -> Trajectory:
    """What the agent makes of the item. ``limit`` is entered here.

    Raises:
        NotAsync: see there.
        TimeoutError: it was told that it is late, and went on.
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
        if limit.expired():
            raise TimeoutError
    return _trajectory(session, result)


def too_late(timeout: float | None, error: BaseException) -> DeadlineExceeded:
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
    else:
        assert isinstance(error, Exception)
        return error
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
