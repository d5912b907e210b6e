"""A stop expression that takes for ever on some text (``(a+)+b`` on many a's) ends its own request.

SGLang searches every output of a step between two steps, and Python's ``re`` backtracks: twice as
long with every further character. All requests of the worker would wait, until the driver gave it
up as hung and sent the same request to the next one.

Not for ``tp_size > 1``: each rank searches by itself, and one that is just in time goes on with a
request that has ended for the others.
"""

from __future__ import annotations

import re
import signal
from typing import Any, Final

from sglang.srt.managers import schedule_batch

LIMIT: Final = 0.5
"""Seconds of CPU time for one search: a thousand times what an ordinary one takes on an output of
ten thousand characters."""
AGAIN: Final = 0.01
"""For an expression that has once exceeded it: several samples may have the same one."""
_SLOW: Final = 256


def install() -> None:
    """Call in the worker, on its main thread."""
    signal.signal(signal.SIGVTALRM, _too_long)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGVTALRM})
    schedule_batch.re = _Searches()


def _too_long(*_: Any) -> None:
    # ``re`` looks for signals while it searches. To SGLang it is as if the expression were wrong.
    raise re.error(f"it takes longer than {LIMIT} s on what was generated")


class _Searches:
    """Stands for the module ``re`` where SGLang looks for the end of an output."""

    error = re.error

    def __init__(self) -> None:
        self._slow: set[str] = set()

    def search(self, pattern: str, text: str) -> re.Match[str] | None:
        signal.setitimer(signal.ITIMER_VIRTUAL, AGAIN if pattern in self._slow else LIMIT)
        try:
            return re.search(pattern, text)
        except re.error:
            if len(self._slow) >= _SLOW:
                self._slow.clear()
            self._slow.add(pattern)
            raise
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
