"""Import the user's score function and call it."""

from __future__ import annotations

import asyncio
import copy
import importlib
import inspect
import math
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

from ...errors import SglrlError, UsageError
from .items import Item


class Score:
    """The score function from a user's module: ``score(item, text) -> float | bool``.

    The function may be async.

    Args:
        spec: the function, as "module:function". The module may be in the current folder.

    Raises:
        UsageError: the function cannot be imported, or does not accept ``item`` and ``text``.
    """

    def __init__(self, spec: str) -> None:
        self._spec = spec
        self._function = _find(spec)

    async def __call__(self, item: Item, text: str) -> float:
        """Return the score of a sample.

        A function that is not async runs on the thread of the event loop, so it need not be
        thread-safe and may use signals. The engines continue to generate meanwhile.

        Raises:
            SglrlError: the function raised an exception, or returned no finite number.
        """
        name = f"{item.place}: --score {self._spec}"
        try:
            # The function receives a copy, because the output must have the fields of the input.
            passed = self._function(copy.deepcopy(item.fields), text)
            if inspect.isawaitable(passed):
                passed = await passed
        except Exception as error:
            raise SglrlError(f"{name} raised an exception\n{_traceback(error)}") from error
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise SglrlError(f"{name} was cancelled by something that it awaited") from error
        try:
            # This accepts numbers of numpy and torch too, but no text.
            value = float(passed) if hasattr(passed, "__float__") else math.nan
        except (TypeError, ValueError, OverflowError, RuntimeError):
            value = math.nan
        if not math.isfinite(value):
            raise SglrlError(f"{name} must return a finite number or a bool, got {passed!r:.200}")
        return value


def _find(spec: str) -> Callable[[dict[str, Any], str], Any]:
    module_name, _, name = spec.partition(":")
    if not module_name or not name:
        raise UsageError(f"--score must be module:function, got {spec!r}")
    # The path of the installed command does not contain the current folder.
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise UsageError(
            f"--score {spec}: cannot import {module_name!r}\n{_traceback(error)}"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        what = "has no such name" if not hasattr(module, name) else f"has {function!r:.100} there"
        raise UsageError(f"--score {spec} is not a function: {module.__file__} {what}")
    try:
        inspect.signature(function).bind({}, "")
    except ValueError:
        pass  # Some built-in functions have no signature.
    except TypeError as error:
        raise UsageError(
            f"--score {spec} is called with the item and the text of a sample: {error}"
        ) from None
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
