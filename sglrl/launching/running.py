"""Run a program's main coroutine."""

from __future__ import annotations

import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")


def run(main: Coroutine[Any, Any, _T]) -> _T:
    """Run ``main`` on uvloop, as ``asyncio.run`` does, and end with one line on Ctrl-C.

    Ctrl-C cancels ``main``, so ``async with`` blocks close their clients and workers. The program
    then exits with status 130, without a traceback.
    """
    import uvloop

    try:
        return uvloop.run(main)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(130)
