"""Submit calls and gather every result."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from ..core.calls import Call
from .driver import Driver


async def submit_all(
    driver: Driver,
    calls: list[Call],
    futures: Sequence[asyncio.Future[Any]],
    *,
    return_exceptions: bool = False,
) -> list[Any]:
    """Submit the calls; return their results in order.

    Raises:
        Exception: the first failure, which cancels the other calls. With ``return_exceptions`` a
            failure is a result instead.
    """
    submitted = 0
    try:
        for call in calls:
            driver.submit(call)
            submitted += 1
        return await asyncio.gather(*futures, return_exceptions=return_exceptions)
    finally:
        for call, future in zip(calls[:submitted], futures, strict=False):
            # A worker may still compute a call whose answer was malformed.
            if not future.done() or future.cancelled() or future.exception() is not None:
                driver.cancel(call)
