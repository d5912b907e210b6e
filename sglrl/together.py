"""Several calls of which all are wanted."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from .core.calls import Call
from .driver import Driver


async def submit_all(
    driver: Driver,
    calls: list[Call],
    futures: Sequence[asyncio.Future[Any]],
    *,
    return_exceptions: bool = False,
) -> list[Any]:
    """All results in order. The first failure cancels the rest and is raised, or
    (``return_exceptions``) is a result."""
    submitted = 0
    try:
        for call in calls:
            driver.submit(call)
            submitted += 1
        return await asyncio.gather(*futures, return_exceptions=return_exceptions)
    finally:
        for call, future in zip(calls[:submitted], futures, strict=False):
            # One whose answer was malformed may still be computed.
            if not future.done() or future.cancelled() or future.exception() is not None:
                driver.cancel(call)
