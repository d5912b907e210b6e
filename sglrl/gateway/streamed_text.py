"""The text of the choices of a request as it arrives, for a stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from ..sessions.session_spec import SessionSpec
from ..wire.engine import TokenChunk
from .deltas import Deltas
from .dialect import Part, TurnRequest


class StreamedText:
    """Iterate over it for the number of a choice, the part of its message, and new text."""

    def __init__(self, requests: Sequence[TurnRequest]) -> None:
        self._requests = [one for one in requests for _ in range(one.choices)]
        self._deltas: list[Deltas | None] = [None] * len(self._requests)
        self._parts: list[tuple[int, Part, str]] = []
        self._arrived = asyncio.Event()
        self._ended = False

    @property
    def sent(self) -> list[Mapping[Part, str]]:
        """For each choice, the text of each part of the message so far."""
        return [{} if deltas is None else deltas.sent for deltas in self._deltas]

    def add(self, choice: int, spec: SessionSpec, chunk: TokenChunk) -> None:
        """Add new tokens of a choice.

        Args:
            spec: of its session.
        """
        deltas = self._deltas[choice]
        if deltas is None:
            sampling = self._requests[choice].sampling
            deltas = self._deltas[choice] = Deltas(spec, spec.prepare(dict(sampling)).params)
        if parts := deltas.add(chunk):
            self._parts += [(choice, part, text) for part, text in parts]
            self._arrived.set()

    def end(self, task: asyncio.Task[Any]) -> None:
        self._ended = True
        self._arrived.set()

    async def begun(self) -> None:
        """Wait for the first text, or the end."""
        await self._arrived.wait()

    async def __aiter__(self) -> AsyncIterator[tuple[int, Part, str]]:
        while True:
            await self._arrived.wait()
            parts, self._parts = self._parts, []
            if not self._ended:
                self._arrived.clear()
            elif not parts:
                return
            for part in parts:
                yield part
