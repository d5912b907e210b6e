"""Show a line about work that takes longer than a second."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

logger = logging.getLogger("sglrl.launch")

SLOW_SECONDS: float = 1.0
"""The number of seconds after which work is shown."""


@asynccontextmanager
async def shown_if_slow(what: str, *, shown: bool) -> AsyncIterator[None]:
    """Write a line about the work in the block to stderr if it takes longer than a second.

    Args:
        what: the text of the line.
        shown: whether to write to stderr. If False, log the line instead.
    """

    def show() -> None:
        if shown and sys.stderr is not None:
            sys.stderr.write(f"sglrl: {what} ...\n")
            sys.stderr.flush()
        else:
            logger.info("%s", what)

    timer = asyncio.get_running_loop().call_later(SLOW_SECONDS, show)
    try:
        yield
    finally:
        timer.cancel()
