"""Run cases of a test that mostly wait at the same time, on one loop."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Iterable
from typing import Any


async def at_once(case: Callable[..., Coroutine[Any, Any, None]], *values: Iterable[Any]) -> None:
    """Run ``case`` with each combination of values, all at the same time.

    Raises:
        ExceptionGroup: some cases failed. The note of each error names its case.
    """

    async def run(arguments: tuple[Any, ...]) -> None:
        try:
            await case(*arguments)
        except BaseException as error:
            error.add_note(f"in the case {arguments}")
            raise

    async with asyncio.TaskGroup() as group:
        for arguments in itertools.product(*values):
            group.create_task(run(arguments))
