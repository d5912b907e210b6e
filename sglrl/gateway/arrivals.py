"""A queue from callbacks to the one coroutine that reads it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")


class Arrivals(Generic[_T]):
    """Iterate over it for what was added, until it ends."""

    def __init__(self) -> None:
        self._items: list[_T] = []
        self._arrived = asyncio.Event()
        self._ended = False

    def add(self, item: _T) -> None:
        self._items.append(item)
        self._arrived.set()

    def end(self, task: asyncio.Task[Any] | None = None) -> None:
        """Nothing is added any more. A callback of a task."""
        self._ended = True
        self._arrived.set()

    async def begun(self) -> None:
        """Wait for the first item, or the end."""
        await self._arrived.wait()

    async def __aiter__(self) -> AsyncIterator[_T]:
        while True:
            await self._arrived.wait()
            items, self._items = self._items, []
            if not self._ended:
                self._arrived.clear()
            elif not items:
                return
            for item in items:
                yield item
