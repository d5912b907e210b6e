"""Run the tools that an assistant calls: ``Session.run_tools``."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

import msgspec

from .. import tracing
from ..config import check_timeout
from ..errors import ToolError, UsageError, WorkerLost
from ..inference.completion import Completion
from ..inference.message import ToolCall
from ..transport.system_limits import start_thread

Tool = Callable[..., Any]
"""A function that gets the arguments of a call by name. It returns a result or an awaitable."""
OnError = Literal["observe", "raise"]


class Conversation(Protocol):
    """The parts of ``Session`` that ``run_tools`` uses."""

    metadata: dict[str, Any]

    @property
    def room(self) -> int: ...

    async def generate(self, **values: Any) -> Completion: ...

    def observe(self, what: Any) -> None: ...


async def run_tools(
    session: Conversation,
    tools: Mapping[str, Tool] | Sequence[Tool],
    *,
    max_turns: int,
    timeout: float | None,
    on_error: OnError,
    max_result: int,
    **values: Any,
) -> Completion:
    """Sample turns and run the tools that they call, until a turn calls none.

    See ``Session.run_tools``.
    """
    known = _by_name(tools)
    limit = check_timeout(timeout)
    if on_error not in ("observe", "raise"):
        raise UsageError(f'on_error must be "observe" or "raise", got {on_error!r}')
    for name, number in (("max_turns", max_turns), ("max_result", max_result)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise UsageError(f"{name} must be an integer of at least 1, got {number!r}")
    for number in range(1, max_turns + 1):
        turn = await session.generate(**values)
        calls = turn.tool_calls
        if not calls or number == max_turns or not session.room:
            break
        outcomes = await _run_all([_run(known, call, limit) for call in calls])
        errors = [outcome for outcome in outcomes if isinstance(outcome, ToolError)]
        for error in errors:
            session.metadata.setdefault("tool_errors", []).append(
                {"call": error.call_id, "tool": error.tool, "error": error.message}
            )
        if errors and on_error == "raise":
            raise errors[0]
        session.observe(
            [
                {
                    "role": "tool",
                    "tool_call_id": call.id,
                    "name": call.name,
                    "content": _text(outcome, max_result),
                }
                for call, outcome in zip(calls, outcomes, strict=True)
            ]
        )
    return turn


def _by_name(tools: Mapping[str, Tool] | Sequence[Tool]) -> dict[str, Tool]:
    if isinstance(tools, Mapping):
        named = dict(tools)
    elif not isinstance(tools, Sequence):
        raise UsageError(
            f"tools must be a list of functions, or a mapping of them by name, got {tools!r:.200}; "
            "for one tool, use run_tools([tool])"
        )
    else:
        named = {getattr(tool, "__name__", repr(tool)): tool for tool in tools}
        if len(named) < len(tools):
            raise UsageError("two of the tools have the same name")
    wrong = [name for name, tool in named.items() if not callable(tool)]
    if wrong:
        raise UsageError(f"the tool {wrong[0]!r} cannot be called")
    return named


async def _run_all(runs: Sequence[Any]) -> list[Any]:
    """Run all calls at the same time. If this coroutine is cancelled, cancel the calls."""
    tasks = [asyncio.ensure_future(run) for run in runs]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def _run(tools: Mapping[str, Tool], call: ToolCall, timeout: float | None) -> Any:
    """Return the outcome of a call, as ``_outcome`` does, and make the span of the call."""
    attributes = {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": call.name,
        "gen_ai.tool.call.id": call.id,
    }
    with tracing.span("tool", attributes) as span:
        outcome = await _outcome(tools, call, timeout)
        if isinstance(outcome, ToolError):
            tracing.end(span, outcome.__cause__ or outcome)
    return outcome


async def _outcome(tools: Mapping[str, Tool], call: ToolCall, timeout: float | None) -> Any:
    """Return the result of a call, or a ``ToolError`` with the reason why it has none."""
    if call.error:
        return ToolError(f"this is no valid call: {call.error}", tool=call.name, call_id=call.id)
    tool = tools.get(call.name)
    if tool is None:
        known = ", ".join(sorted(tools)) or "none"
        return ToolError(
            f"there is no tool {call.name!r}; there are: {known}", tool=call.name, call_id=call.id
        )
    task = asyncio.ensure_future(_result(tool, call.arguments or {}))
    try:
        await asyncio.wait({task}, timeout=timeout)
    except asyncio.CancelledError:
        task.cancel()
        raise
    if not task.done():
        # A tool that ignores its cancellation is not waited for.
        task.cancel()
        task.add_done_callback(_retrieve)
        return ToolError(f"no result within {timeout:g} s", tool=call.name, call_id=call.id)
    if task.cancelled():
        return ToolError("the tool was cancelled", tool=call.name, call_id=call.id)
    error = task.exception()
    if error is None:
        return task.result()
    if not isinstance(error, Exception) or (isinstance(error, WorkerLost) and error.state_lost):
        # The tool's process has lost the state of this conversation, so the run cannot go on.
        raise error
    failure = ToolError(f"{type(error).__name__}: {error}", tool=call.name, call_id=call.id)
    failure.__cause__ = error
    return failure


async def _result(tool: Tool, arguments: dict[str, Any]) -> Any:
    called = tool if inspect.isroutine(tool) else getattr(tool, "__call__", tool)  # noqa: B004
    if inspect.iscoroutinefunction(tool) or inspect.iscoroutinefunction(called):
        return await tool(**arguments)
    # Tools in threads see the context variables of the session, as with ``asyncio.to_thread``.
    context = contextvars.copy_context()
    made = await _in_thread(functools.partial(context.run, tool, **arguments))
    return await made if inspect.isawaitable(made) else made


async def _in_thread(call: Callable[[], Any]) -> Any:
    """Call a function in a daemon thread, because it may block or never return.

    The exit of the process does not wait for a daemon thread.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def finish(result: Any, error: Exception | None) -> None:
        if not done.done():
            if error is None:
                done.set_result(result)
            else:
                done.set_exception(error)

    def run() -> None:
        result: Any = None
        error: Exception | None = None
        try:
            result = call()
        except StopIteration as stop:
            # A future cannot hold a StopIteration.
            error = RuntimeError(repr(stop))
        except Exception as failure:
            error = failure
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(finish, result, error)

    start_thread(threading.Thread(target=run, name="sglrl-tool", daemon=True))
    return await done


def _retrieve(task: asyncio.Task[Any]) -> None:
    """Retrieve the exception of an abandoned task, so that asyncio does not log it."""
    if not task.cancelled():
        task.exception()


def _text(outcome: Any, most: int) -> str:
    """Return a result as the content of a message, cut after ``most`` characters."""
    if isinstance(outcome, ToolError):
        text = f"error: {outcome.message}"
    elif isinstance(outcome, str):
        text = outcome
    else:
        try:
            text = msgspec.json.encode(outcome, enc_hook=str).decode()
        except (TypeError, ValueError, OverflowError, RecursionError):
            text = str(outcome)
    if len(text) > most:
        return f"{text[:most]}... (cut: {len(text):,} characters)"
    return text
