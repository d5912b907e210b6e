"""End a request whose stop expression takes too long to search in its output.

An example is ``(a+)+b`` on many a's. SGLang searches every output between two steps. Python's
``re`` backtracks, so each further character doubles the time. All requests of the worker would wait
until the driver detects a hang and kills the worker. The next worker would get the same request.

Do not install this with ``tp_size > 1``. Each rank searches by itself. If only some ranks exceeded
the limit, the request would end on these ranks and continue on the others.
"""

from __future__ import annotations

import re
import signal
from typing import Any, Final

from sglang.srt.managers import schedule_batch

from ..patch import Setup

LIMIT: Final = 0.5
"""Seconds of CPU time for one search.

This is a thousand times the time of an ordinary search in an output of ten thousand characters.
"""
AGAIN: Final = 0.01
"""Seconds for an expression that exceeded the limit before. Many samples may share it."""
_SLOW: Final = 256


def install(setup: Setup) -> None:
    """Limit the time of SGLang's searches. Call on the worker's main thread."""
    signal.signal(signal.SIGVTALRM, _too_long)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGVTALRM})
    schedule_batch.re = _Searches()


def _too_long(*_: Any) -> None:
    # ``re`` handles signals while it searches. SGLang handles this error as a wrong expression.
    raise re.error(f"it takes longer than {LIMIT} s on what was generated")


class _Searches:
    """Replaces the module ``re`` in SGLang's search for the end of an output."""

    error = re.error

    def __init__(self) -> None:
        self._slow: set[str] = set()

    def compile(self, pattern: str) -> _Search:
        return _Search(self, pattern)

    def search(self, pattern: str, text: str, at: int = 0) -> re.Match[str] | None:
        """Search from a position, as ``re.Pattern.search`` does."""
        signal.setitimer(signal.ITIMER_VIRTUAL, AGAIN if pattern in self._slow else LIMIT)
        try:
            return re.compile(pattern).search(text, at)
        except re.error:
            if len(self._slow) >= _SLOW:
                self._slow.clear()
            self._slow.add(pattern)
            raise
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)


class _Search:
    """Replaces a compiled pattern, so that its searches have a time limit."""

    def __init__(self, searches: _Searches, pattern: str) -> None:
        self._searches = searches
        self._pattern = pattern

    def search(self, text: str, at: int = 0) -> re.Match[str] | None:
        return self._searches.search(self._pattern, text, at)
