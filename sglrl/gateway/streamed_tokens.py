"""The tokens of the choices of a request as they arrive, for a stream."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import msgspec
import numpy as np

from ..driver.driver import now
from ..inference.chunk import StreamText
from ..sessions.session_spec import SessionSpec
from ..wire.engine import TokenChunk
from .arrivals import Arrivals
from .dialect import Progress, Sent, TokenAnswer, TurnRequest
from .unfinished import unfinished


class StreamedTokens:
    """Makes the events of a stream with tokens. Events that are late have several new tokens.

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
        """What the events had, by choice."""
        return [Sent() if choice is None else choice.sent for choice in self._choices]

    def add(self, choice: int, spec: SessionSpec, chunk: TokenChunk) -> None:
        """Add new tokens of a choice.

        Args:
            spec: of its session.
        """
        found = self._choices[choice]
        if found is None:
            found = self._choices[choice] = _Choice(spec, self._requests[choice], self._began)
        if chunk.finish in ("", "abort") and chunk.ids:
            # Aborted turns of sessions go on. The end of a turn is sent with the whole turn.
            found.add(chunk)
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
        """One for each policy version, so that an event is made of few."""
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
        found = unfinished(
            self.spec, self._prompt, self._chunks, self._params, self._top, self._began
        )
        return Progress(found, self._so_far, self.sent)

    def mark_sent(self) -> None:
        """The tokens so far were sent, and the text that was decoded."""
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
    """Return the prompt's token ids, int32. b"": they are not known yet."""
    if request.prompt is not None and not isinstance(request.prompt, str):
        return np.array(request.prompt, "<i4").tobytes()
    # The turn has begun, so its prompt is encoded.
    return spec.known_ids or b""
