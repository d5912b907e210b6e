"""The agent of an evaluation, which calls the user's score function or the user's agent."""

from __future__ import annotations

import asyncio
import copy
import importlib
import inspect
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ...errors import EngineError, SglrlError, UsageError
from ...rollouts.evaluation import outcomes_of
from ...rollouts.group import Group
from ...sessions.session import Session
from .items import Item
from .results import Sample


class EvalAgent:
    """The agent of an evaluation, for ``rollout``.

    Args:
        score: "module:function" of ``--score``. Samples then have one turn, which it scores.
        agent: "module:function" of ``--agent``. Its reward is the score.

    Raises:
        UsageError: the function cannot be imported, or cannot be called with its two arguments.
    """

    def __init__(self, score: str | None, agent: str | None) -> None:
        self._score = None if score is None else Score(score)
        self._agent = None if agent is None else UserFunction("--agent", agent, "session and item")
        self._is_scored = score is not None or agent is not None

    async def __call__(self, session: Session, item: Item) -> Any:
        if self._agent is not None:
            return await self._agent(item.place, session, copy.deepcopy(item.fields))
        with _naming(item):
            turn = await session.generate()
        session.metadata["text"] = turn.text
        return 0.0 if self._score is None else await self._score(item, turn.text)

    def samples(self, group: Group, *, logprobs: bool) -> list[Sample]:
        """Return the samples of an item as the output file holds them."""
        return [
            Sample(
                finish_reason=outcome.finish_reason,
                tokens=outcome.tokens,
                score=outcome.score,
                text=made.metadata["text"] if self._agent is None else made.text,
                rewards=made.named_rewards,
                output_ids=made.response_ids.tolist() if logprobs else None,
                logprobs=made.logprobs.tolist() if logprobs else None,
            )
            for made, outcome in zip(
                group.trajectories, outcomes_of(group, scored=self._is_scored), strict=True
            )
        ]


@contextmanager
def _naming(item: Item) -> Iterator[None]:
    """Add the place of the item in the input to an error that the block raises."""
    try:
        yield
    except (UsageError, EngineError) as error:
        raise type(error)(f"{item.place}: {error.message}") from error


class UserFunction:
    """A function from a user's module, whose errors name the item.

    Args:
        option: the option that names the function, for errors.
        spec: the function, as "module:function". The module may be in the current folder.
        arguments: the names of its two arguments, for errors.

    Raises:
        UsageError: the function cannot be imported, or does not accept two arguments.
    """

    def __init__(self, option: str, spec: str, arguments: str) -> None:
        self.name = f"{option} {spec}"
        self._function = _find(option, spec, arguments)

    async def __call__(self, place: str, *arguments: Any) -> Any:
        """Return the result of the function, which may be async.

        Raises:
            UsageError, EngineError: a turn failed.
            SglrlError: the function raised any other exception.
        """
        try:
            result = self._function(*arguments)
            return await result if inspect.isawaitable(result) else result
        except (UsageError, EngineError) as error:
            raise type(error)(f"{place}: {self.name}: {error.message}") from error
        except Exception as error:
            raise SglrlError(
                f"{place}: {self.name} raised an exception\n{_traceback(error)}"
            ) from error
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise SglrlError(
                f"{place}: {self.name} was cancelled by something that it awaited"
            ) from error


class Score:
    """The score function from a user's module: ``score(item, text) -> float | bool``.

    The function may be async.
    """

    def __init__(self, spec: str) -> None:
        self._function = UserFunction("--score", spec, "the item and the text of a sample")

    async def __call__(self, item: Item, text: str) -> float:
        """Return the score of a sample.

        A function that is not async runs on the thread of the event loop, so it need not be
        thread-safe and may use signals. The engines continue to generate meanwhile.

        Raises:
            SglrlError: the function raised an exception, or returned no finite number.
        """
        # The function receives a copy, because the output must have the fields of the input.
        passed = await self._function(item.place, copy.deepcopy(item.fields), text)
        try:
            # This accepts numbers of numpy and torch too, but no text.
            value = float(passed) if hasattr(passed, "__float__") else math.nan
        except (TypeError, ValueError, OverflowError, RuntimeError):
            value = math.nan
        if not math.isfinite(value):
            raise SglrlError(
                f"{item.place}: {self._function.name} must return a finite number or a bool, got "
                f"{passed!r:.200}"
            )
        return value


def _find(option: str, spec: str, arguments: str) -> Callable[..., Any]:
    module_name, _, name = spec.partition(":")
    if not module_name or not name:
        raise UsageError(f"{option} must be module:function, got {spec!r}")
    # The path of the installed command does not contain the current folder.
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise UsageError(
            f"{option} {spec}: cannot import {module_name!r}\n{_traceback(error)}"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        what = "has no such name" if not hasattr(module, name) else f"has {function!r:.100} there"
        raise UsageError(f"{option} {spec} is not a function: {module.__file__} {what}")
    try:
        inspect.signature(function).bind({}, "")
    except ValueError:
        pass  # Some built-in functions have no signature.
    except TypeError as error:
        raise UsageError(f"{option} {spec} is called with {arguments}: {error}") from None
    return function  # type: ignore[no-any-return]


def _traceback(error: BaseException) -> str:
    """Return the traceback without the frames of this file and of Python's import system."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename != __file__ and "importlib" not in frame.filename
    ]
    lines = traceback.format_list(frames) + traceback.format_exception_only(error)
    return "".join(lines).rstrip()
