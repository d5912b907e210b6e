"""Decide when hosts keep the current weights, so that a lost worker does not take them with it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final, Literal

from .deadline import Deadline
from .kept import Kept
from .ranks import Rank
from .versions import Versions

KeepMode = Literal["auto", "host"] | None

_KEEP_SECONDS: Final = 120.0
"""Seconds for the hosts to keep the weights of an update."""


class Safekeeping:
    """Starts copies of the current weights to the memory of hosts, one at a time.

    Args:
        mode: "auto": a host keeps the weights while only one worker has them. "host": each host
            keeps them. None: no host does.
        kept: makes the copies.
    """

    def __init__(self, mode: KeepMode, kept: Kept, versions: Versions) -> None:
        self._mode = mode
        self._kept = kept
        self._versions = versions
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Let hosts keep the current weights if they must, once no update or copy runs."""
        if (self._task is None or self._task.done()) and self._needed():
            self._task = asyncio.get_running_loop().create_task(self._keep())

    def interrupt(self) -> None:
        """Stop the copy that runs, because an update is about to replace the weights."""
        if self._task is not None:
            self._task.cancel()

    async def ended(self) -> None:
        """Wait until no copy runs. Each copy has a deadline, so this wait ends."""
        if self._task is not None:
            await asyncio.wait([self._task])

    def _needed(self) -> Sequence[Rank]:
        """Return the ranks whose weights hosts must keep.

        Every worker loads version 0 itself when it starts.
        """
        versions = self._versions
        if self._mode is None or versions.current == 0 or versions.asleep:
            return ()
        holders = versions.holders()
        several = len({rank.worker for rank in holders}) > 1
        return () if self._mode == "auto" and several else holders

    async def _keep(self) -> None:
        # Each update and each copy has a deadline, so this wait ends.
        async with self._versions.lock:
            if holders := self._needed():
                await self._kept.keep(holders, self._versions.current, Deadline(_KEEP_SECONDS))
