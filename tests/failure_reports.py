"""Keep Python's parser usable while pytest formats the traceback of a failed test.

pytest parses the source of each frame. This allocates objects, so the garbage collector may run,
and with it the finalizers of what the failed test left: a stream, a task, a socket. When one of
them raises, pytest formats that exception, which parses source as well. Python before 3.11.8 and
3.12.2 then raises "SystemError: AST constructor recursion depth mismatch" from the outer parse
(CPython issue 106905), and pytest ends without the name of the test.
"""

from __future__ import annotations

import gc
from collections.abc import Generator

import pytest


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Collect no garbage while a report is made."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return (yield)
    finally:
        if was_enabled:
            gc.enable()
