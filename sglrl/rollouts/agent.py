"""Run the agent for one sample of a run, in any process."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any, Protocol

from ..config import type_of
from ..errors import DeadlineExceeded, InvalidRequest, SglrlError, UsageError
from ..sessions.gate import Gate
from ..sessions.session import Session
from ..sessions.session_spec import SessionSpec
from ..sessions.trajectory import Trajectory
from .task_ending import Limit

logger = logging.getLogger("sglrl.rollout")

Agent = Callable[[Session, Any], Awaitable[Any]]


class Gateway(Protocol):
    """An HTTP server of this process, through which agents can use sessions."""

    def lend(self, session: Session) -> AbstractAsyncContextManager[None]: ...


class NotAsync(UsageError):
    """The agent is not a coroutine function, so every sample fails."""


@asynccontextmanager
async def made_ready(agent: Agent | type[Any]) -> AsyncGenerator[Agent, None]:
    """Provide the agent as a callable.

    If the agent is a class, or a ``functools.partial`` of a class, make an instance. Enter the
    instance if it is a context manager. Provide any other agent unchanged.
    """
    made_of = agent.func if isinstance(agent, functools.partial) else agent
    async with AsyncExitStack() as stack:
        if not isinstance(made_of, type):
            yield agent
            return
        try:
            instance: Any = agent()  # type: ignore[call-arg]
        except TypeError as error:
            error.add_note(
                "an agent class is called without arguments; pass "
                f"functools.partial({made_of.__name__}, ...) to give it arguments"
            )
            raise
        # As in a ``with`` statement, the agent is the value that entering returns.
        if hasattr(instance, "__aenter__"):
            instance = await stack.enter_async_context(instance)
        elif hasattr(instance, "__enter__"):
            instance = stack.enter_context(instance)
        if not callable(instance):
            raise UsageError(
                f"{made_of.__name__} returned a {type(instance).__name__}, which cannot be "
                "called, so it is not an agent"
            )
        yield instance


async def load(spec: SessionSpec, item: int, *, must: bool) -> None:
    """Encode the prompt of an item, and warn once if it leaves no room for a response.

    Args:
        must: whether to raise errors of the prompt. If False, the agent's first turn raises them.

    Raises:
        InvalidRequest: the prompt cannot be encoded.
    """
    try:
        await spec.load()
    except InvalidRequest:
        if must:
            raise
        return
    if spec.too_long and not spec.warned:
        spec.warned = True
        logger.warning(
            "item %d cannot be sampled: %s; shorten or leave it out", item, spec.too_long
        )


async def play(
    agent: Agent, session: Session, item: Any, limit: Limit | None, gateway: Gateway | None
) -> Trajectory:
    """Run the agent on the item and return the trajectory.

    Args:
        limit: the time limit, which this function enters.
        gateway: the HTTP server of the session, or None if the agent does not use HTTP.

    Raises:
        NotAsync: the agent is not a coroutine function.
        TimeoutError: the agent took longer than its time limit. ``is_late(limit)`` is then true.
        UsageError: the agent returned neither a reward nor a trajectory.
        InvalidRequest: the agent failed, and the prompt of the item leaves no room for a response.
        BaseException: the agent's own exceptions.
    """
    try:
        if gateway is None:
            result = await _result(agent, session, item, limit)
        else:
            async with gateway.lend(session):
                result = await _result(agent, session, item, limit)
    except UsageError:
        raise
    except Exception as error:
        problem = session.spec.too_long
        if problem and not session.turns:
            # Another attempt cannot succeed, so replace the agent's own exception.
            raise InvalidRequest(f"the item cannot be sampled: {problem}") from error
        raise
    return _trajectory(session, result)


async def _result(agent: Agent, session: Session, item: Any, limit: Limit | None) -> Any:
    made = agent(session, item)
    if not inspect.isawaitable(made):
        raise NotAsync(f"the agent must be async: it returned {made!r:.100}")
    if limit is None:
        return await _explained(made)
    async with limit:
        result = await _explained(made)
        if is_late(limit):
            # The agent blocked the event loop, or ignored its cancellation.
            raise TimeoutError
    return result


async def _explained(made: Awaitable[Any]) -> Any:
    """Await the agent. If Python raises an error about a missing ``await``, add a hint to it."""
    try:
        return await made
    except (AttributeError, TypeError) as error:
        for kind, word in (("coroutine", "await"), ("async_generator", "async for")):
            if f"'{kind}'" in str(error):
                error.add_note(f"'{word}' is missing before the call that returned this {kind}")
        raise


def is_late(limit: Limit | None) -> bool:
    """Return whether the time limit is over, also if the agent was not cancelled yet."""
    if limit is None:
        return False
    at = limit.when()
    return limit.expired() or (at is not None and asyncio.get_running_loop().time() >= at)


def too_late(timeout: float | None, error: BaseException | None) -> DeadlineExceeded:
    """Return the error of an agent that took longer than ``timeout``.

    Args:
        error: the exception with which the cancelled agent ended, if any.
    """
    late = DeadlineExceeded(f"the agent took longer than {timeout:g} s (timeout)")
    late.__cause__ = error
    return late


def as_failure(error: BaseException) -> Exception:
    """Convert the exception of an agent that the run has not cancelled to an ``Exception``."""
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
    named = isinstance(result, Mapping)
    if not named and (isinstance(result, (str, bytes)) or not hasattr(result, "__float__")):
        raise UsageError(
            f"the agent must return its reward, named rewards or a Trajectory, got "
            f"{type_of(result)}"
        )
    if not session.turns:
        raise UsageError(
            "the agent returned before a turn was sampled; it must await session.generate(...)"
        )
    return session.trajectory(result)


def session_of_sample(
    spec: SessionSpec,
    gate: Gate,
    on_turn: Callable[[int, int, int], None],
    item: int,
    sample: int,
    tries: int,
) -> Session:
    """Return the session of one sample of a run.

    The indices ``item`` and ``sample`` are added to the metadata, unless it has keys with these
    names. These indices and ``tries``, the number of earlier attempts, select the seeds of the
    turns.
    """
    session = Session(spec, gate, on_turn, (item, sample, tries))
    session.metadata.setdefault("item", item)
    session.metadata.setdefault("sample", sample)
    return session
