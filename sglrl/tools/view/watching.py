"""Follow a running pool: its running samples, its finished samples and its updates."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any, Final

import msgspec

from ...client.client import Client
from ...control.snapshot import Snapshot
from ...errors import SglrlError
from ...sessions.live import LiveSample
from .store import Store

_INTERVAL: Final = 0.5
"""Seconds between two descriptions of the pool, while a page is open."""
_ROW_SECONDS: Final = 5.0
"""The longest time between the end of a sample and its row."""


class Watching:
    """The state of a running pool, as far as a page shows it.

    Asks the pool only while a page is open. The samples that finish are asked for all the time, so
    that none is missed.

    Attributes:
        client: is connected to the pool.
        snapshot: the latest description of the pool.
        samples: the running samples.
        problem: why the pool can no longer be watched, or "".
    """

    def __init__(self, client: Client, store: Store) -> None:
        self.client = client
        self.snapshot: Snapshot | None = None
        self.samples: list[LiveSample] = []
        self.problem = ""
        self._store = store
        self._ended: dict[tuple[Any, Any], int] = {}
        """The row of the latest sample that has ended, by its item and its index in the group."""
        self._pages = 0
        self._opened = asyncio.Event()
        self._changed = asyncio.Condition()
        self._changes = 0

    async def run(self) -> None:
        """Follow the pool until it closes."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._follow_ended())
                tasks.create_task(self._describe())
        except* SglrlError as errors:
            self.problem = str(errors.exceptions[0])
        except* OSError as errors:
            self.problem = f"the finished samples cannot be kept: {errors.exceptions[0]}"
        self.samples = []
        await self.tell()

    async def tell(self) -> None:
        """Wake the pages."""
        async with self._changed:
            self._changes += 1
            self._changed.notify_all()

    async def states(self) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the state for a page, now and whenever it changes."""
        self._pages += 1
        self._opened.set()
        try:
            while True:
                seen = self._changes
                yield self._state()
                async with self._changed:
                    while self._changes == seen:
                        await self._changed.wait()
        finally:
            self._pages -= 1
            if not self._pages:
                self._opened.clear()

    def ended_row(self, sample: LiveSample) -> int | None:
        """Return the row of the latest sample that has ended with the same item and index."""
        return self._ended.get((sample.item, sample.sample))

    async def row_after(self, sample: LiveSample, row: int | None) -> int | None:
        """Return the row of a sample that has ended, or None if it is not of a rollout.

        Args:
            row: ``ended_row`` of the sample while it was running.
        """
        if sample.item is None or sample.sample is None:
            return None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ROW_SECONDS), self._changed:
                while self.ended_row(sample) == row:
                    await self._changed.wait()
                return self.ended_row(sample)
        return None

    def _state(self) -> dict[str, Any]:
        found = self.snapshot
        return {
            "problem": self.problem,
            "rows": self._store.rows.count,
            "version": None if found is None else found.weight_version,
            "held": "" if found is None else found.held,
            "adapters": {} if found is None else found.adapters,
            "workers": 0 if found is None else len(found.workers),
            "samples": [msgspec.structs.asdict(sample) for sample in self.samples],
        }

    async def _follow_ended(self) -> None:
        number: int | None = None
        while True:
            ended = await self.client.ended_samples(number)
            number = ended.next
            for sample in ended.samples:
                self._ended[sample.item, sample.sample] = self._store.add_ended(sample)
            if ended.samples:
                await self.tell()

    async def _describe(self) -> None:
        while True:
            await self._opened.wait()
            self.samples = await self.client.live_samples()
            self.snapshot = await self.client.snapshot()
            await self.tell()
            await asyncio.sleep(_INTERVAL)
