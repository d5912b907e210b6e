"""Log the stack of a call, such as ``time.sleep``, that blocks the event loop of agents."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Final

from ..transport.system_limits import start_thread

logger = logging.getLogger("sglrl.rollout")

BLOCKED_SECONDS: Final = 1.0
_STEPS: Final = 4
"""The number of checks in ``BLOCKED_SECONDS``. A suspension of the process counts as one check."""
_OF_LOOPS: Final = ("asyncio/events.py", "asyncio/base_events.py", "asyncio/runners.py")
"""The files of asyncio whose frames come before the frames of a task."""
_PACKAGE: Final = str(Path(__file__).parents[1])


class LoopWatch:
    """Logs one warning if the running event loop is blocked for ``BLOCKED_SECONDS``.

    A thread schedules callbacks on the loop. If a callback does not run, the thread logs the stack
    of the loop's thread.

    Args:
        is_busy: returns whether agents run. If none runs, a blocked loop is not logged. The thread
            calls this function.
    """

    def __init__(self, is_busy: Callable[[], bool]) -> None:
        self._is_busy = is_busy
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._turned = True
        self._over = threading.Event()
        start_thread(threading.Thread(target=self._watch, name="sglrl-loop-watch", daemon=True))

    def close(self) -> None:
        self._over.set()

    def _turn(self) -> None:
        self._turned = True

    def _watch(self) -> None:
        late = 0
        with contextlib.suppress(RuntimeError):  # The loop is closed.
            while not self._over.wait(BLOCKED_SECONDS / _STEPS):
                if self._turned:
                    late = 0
                    self._turned = False
                    self._loop.call_soon_threadsafe(self._turn)
                    continue
                late += 1
                if late >= _STEPS and self._is_busy() and not self._over.is_set():
                    self._log()
                    return

    def _log(self) -> None:
        frame = sys._current_frames().get(self._loop_thread)
        if frame is None or self._turned:
            return
        logger.warning(
            "a call has blocked the event loop for %g s, so no agent in this process can continue; "
            "run it with asyncio.to_thread, in an sglrl.Actor, or the agents with processes= "
            "(logged once):\n%s",
            BLOCKED_SECONDS,
            stack_of_task(frame),
        )


def stack_of_task(frame: FrameType) -> str:
    """Return the stack of a thread without its first frames, which are of asyncio and sglrl."""
    frames = [*traceback.walk_stack(frame)][::-1]
    files = [f.f_code.co_filename for f, _ in frames]
    begin = max((i for i, file in enumerate(files) if file.endswith(_OF_LOOPS)), default=-1) + 1
    while begin < len(frames) and files[begin].startswith(_PACKAGE):
        begin += 1
    # If no frame is left, sglrl itself blocks.
    shown = frames[begin:] or frames
    return "".join(traceback.StackSummary.extract(iter(shown)).format()).rstrip()
