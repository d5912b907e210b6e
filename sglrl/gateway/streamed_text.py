"""The text of the choices of a request as it arrives, for a stream."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial

from ..sessions.session_spec import SessionSpec
from ..wire.engine import TokenChunk
from .arrivals import Arrivals
from .deltas import Deltas
from .dialect import Answer, NewTokens, Part, TurnRequest
from .unfinished import unfinished


class StreamedText:
    """Makes the events of a stream with the text of messages.

    Attributes:
        arrived: for each new text, the number of its choice, the part of its message, the text, and
            what returns the tokens that have arrived since the text before.
    """

    def __init__(self, requests: Sequence[TurnRequest]) -> None:
        self._requests = [one for one in requests for _ in range(one.choices)]
        self._deltas: list[Deltas | None] = [None] * len(self._requests)
        self._chunks: list[list[TokenChunk]] = [[] for _ in self._requests]
        self.arrived: Arrivals[tuple[int, Part, str, NewTokens]] = Arrivals()

    @property
    def sent(self) -> list[Mapping[Part, str]]:
        """For each choice, the text of each part of the message so far."""
        return [{} if deltas is None else deltas.sent for deltas in self._deltas]

    def add(self, choice: int, spec: SessionSpec, chunk: TokenChunk) -> None:
        """Add new tokens of a choice.

        Args:
            spec: of its session.
        """
        deltas, request = self._deltas[choice], self._requests[choice]
        if deltas is None:
            params = spec.prepare(dict(request.sampling)).params
            deltas = self._deltas[choice] = Deltas(spec, params)
        self._chunks[choice].append(chunk)
        for part, text in deltas.add(chunk):
            chunks, self._chunks[choice] = self._chunks[choice], []
            given = spec, b"", chunks, deltas.params, request.top_logprobs, 0.0
            new = partial(unfinished, *given) if chunks else None
            self.arrived.add((choice, part, text, new))

    async def events(self, answer: Answer) -> AsyncIterator[bytes]:
        """Yield the events of an answer."""
        async for choice, part, text, new in self.arrived:
            yield answer.text(choice, part, text, new)
