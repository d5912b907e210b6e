"""Make the events of streams from the text or the tokens of choices, as they arrive."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

from ..driver.driver import now
from ..inference.chunk import StreamText
from ..sessions.session_spec import SessionSpec
from ..wire.engine import TokenChunk
from .deltas import Deltas
from .dialect import Answer, NewTokens, Part, Progress, Sent, TokenAnswer, TurnRequest
from .unfinished import unfinished

_T = TypeVar("_T")


class Arrivals(Generic[_T]):
    """A queue to which callbacks add items. One coroutine iterates over the items until ``end``."""

    def __init__(self) -> None:
        self._items: list[_T] = []
        self._arrived = asyncio.Event()
        self._ended = False

    def add(self, item: _T) -> None:
        self._items.append(item)
        self._arrived.set()

    def end(self, task: asyncio.Task[Any] | None = None) -> None:
        """End the iteration after all items. This method can be the callback of a task."""
        self._ended = True
        self._arrived.set()

    async def begun(self) -> None:
        """Wait for the first item, or for the end of the queue."""
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


class StreamedText:
    """Makes the events of a stream with the text of messages.

    Attributes:
        arrived: the new texts. Each item has the number of the choice, the part of the message, the
            text, and the ``NewTokens`` that have arrived since the choice's previous text.
    """

    def __init__(self, requests: Sequence[TurnRequest]) -> None:
        self._requests = [one for one in requests for _ in range(one.choices)]
        self._deltas: list[Deltas | None] = [None] * len(self._requests)
        self._chunks: list[list[TokenChunk]] = [[] for _ in self._requests]
        self.arrived: Arrivals[tuple[int, Part, str, NewTokens]] = Arrivals()

    @property
    def sent(self) -> list[Mapping[Part, str]]:
        """For each choice, the text of each part of the message that was passed on so far."""
        return [{} if deltas is None else deltas.sent for deltas in self._deltas]

    def add(self, choice: int, spec: SessionSpec, chunk: TokenChunk) -> None:
        """Add new tokens of a choice.

        Args:
            spec: the settings of the choice's session.
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


class StreamedTokens:
    """Makes the events of a stream with tokens. An event may have several new tokens.

    Attributes:
        arrived: the choices that have new tokens.
    """

    def __init__(self, requests: Sequence[TurnRequest]) -> None:
        self._requests = [one for one in requests for _ in range(one.choices)]
        self._choices: list[_Choice | None] = [None] * len(self._requests)
        self._began = now()
        self.arrived: Arrivals[int] = Arrivals()

    @property
    def sent(self) -> list[Sent]:
        """For each choice, the part that the events so far have sent."""
        return [Sent() if choice is None else choice.sent for choice in self._choices]

    def add(self, choice: int, spec: SessionSpec, chunk: TokenChunk) -> None:
        """Add new tokens of a choice.

        Args:
            spec: the settings of the choice's session.
        """
        entry = self._choices[choice]
        if entry is None:
            entry = self._choices[choice] = _Choice(spec, self._requests[choice], self._began)
        if chunk.finish in ("", "abort") and chunk.ids:
            # A session continues an aborted turn, so these are not its last tokens.
            # ``TokenAnswer.end`` sends the last tokens of a turn.
            entry.add(chunk)
            self.arrived.add(choice)

    async def events(self, answer: TokenAnswer) -> AsyncIterator[bytes]:
        """Yield the events of an answer."""
        async for index in self.arrived:
            choice = self._choices[index]
            assert choice is not None
            if not choice.new:
                continue
            if made := answer.tokens(index, choice.progress()):
                choice.mark_sent()
                yield made


class _Choice:
    """The tokens of a choice that have arrived."""

    def __init__(self, spec: SessionSpec, request: TurnRequest, began: float) -> None:
        self.spec = spec
        self._began = began
        self._params = spec.prepare(dict(request.sampling)).params
        self._top = request.top_logprobs
        self._prompt = _prompt_of(spec, request)
        self._text = ""
        self._texts = StreamText(spec.requests.decode, self._params)
        self._undecoded: list[TokenChunk] = []
        self._chunks: list[TokenChunk] = []
        """The tokens so far. Chunks of one policy version are joined, so there are few."""
        self._tokens = 0
        self.sent = Sent()

    @property
    def new(self) -> bool:
        return self._tokens > self.sent.tokens

    def add(self, chunk: TokenChunk) -> None:
        chunk = msgspec.structs.replace(chunk, finish="", stop_match=None)
        self._tokens += len(chunk.ids) // 4
        self._undecoded.append(chunk)
        if self._chunks and self._chunks[-1].version == chunk.version:
            self._chunks[-1] = _joined(self._chunks[-1], chunk)
        else:
            self._chunks.append(chunk)

    def progress(self) -> Progress:
        completion = unfinished(
            self.spec, self._prompt, self._chunks, self._params, self._top, self._began
        )
        return Progress(completion, self._so_far, self.sent)

    def mark_sent(self) -> None:
        """Record that all tokens so far, and the text that was decoded, were sent."""
        self.sent = Sent(self._tokens, len(self._text))

    def _so_far(self) -> str:
        new, self._undecoded = self._undecoded, []
        self._text += "".join([self._texts.add(chunk)() for chunk in new])
        return self._text


def _joined(one: TokenChunk, other: TokenChunk) -> TokenChunk:
    return msgspec.structs.replace(
        other,
        ids=one.ids + other.ids,
        logprobs=one.logprobs + other.logprobs,
        top_ids=one.top_ids + other.top_ids,
        top_logprobs=one.top_logprobs + other.top_logprobs,
        mask_ids=one.mask_ids + other.mask_ids,
        mask_lengths=one.mask_lengths + other.mask_lengths,
        given_logprobs=one.given_logprobs + other.given_logprobs,
        hidden_states=one.hidden_states + other.hidden_states,
    )


def _prompt_of(spec: SessionSpec, request: TurnRequest) -> bytes:
    """Return the token ids of the prompt of a turn that has begun, int32."""
    if request.prompt is not None and not isinstance(request.prompt, str):
        return np.array(request.prompt, "<i4").tobytes()
    # The prompt was encoded when the turn began.
    return spec.known_ids or b""
