"""Turn the events of an engine call into a ``Completion``, scores or a stream.

Each class is a ``driver.Reply``. The driver calls its methods on the event loop, so they must not
block or raise.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..actors.replies import error_of
from ..core.calls import Call
from ..driver.driver import now
from ..errors import NOT_FINITE, EngineError, ProtocolError, SglrlError
from ..wire.calls import Item, ItemKind
from ..wire.codec import MALFORMED, Buffer
from ..wire.engine import GenerateArgs, TokenChunk
from .completion import (
    Completion,
    Decode,
    NextTokenLogprobs,
    ScoreLogprobs,
    Scores,
    VersionSpan,
)
from .routed_experts import RoutedRows
from .sampling_cache import Prepared
from .sampling_mask import is_whole

_decode_chunk = msgspec.msgpack.Decoder(TokenChunk).decode
_DONE: Final = ItemKind.DONE
OnChunk = Callable[[TokenChunk], None]
"""A callback for new tokens, which is called on the event loop and must not raise."""


def resume(call: Call, chunks: Sequence[TokenChunk]) -> int:
    """Make the call continue after these chunks on the next worker.

    Returns:
        The number of tokens in the chunks.
    """
    ids = b"".join(chunk.ids for chunk in chunks)
    rows = sum(chunk.routed for chunk in chunks)
    assert isinstance(call.args, GenerateArgs)
    call.args = msgspec.structs.replace(call.args, resume=ids, resume_rows=rows)
    return len(ids) // 4


def chunk_of(item: Item) -> TokenChunk:
    """Decode a chunk. Raise ``ProtocolError`` when the worker sent a malformed one."""
    try:
        chunk = _decode_chunk(item.body)
    except MALFORMED as error:
        raise _malformed(error) from None
    if len(chunk.ids) % 4 or len(chunk.logprobs) % 4:
        raise _malformed("its arrays are cut off")
    return chunk


def _malformed(how: object) -> ProtocolError:
    return ProtocolError(f"the worker sent a malformed answer: {how}")


class GenerationReply:
    """Collects one call's chunks and resolves its future with a ``Completion``.

    Attributes:
        begun: the unfinished completion that this call continues, or None.
        routed: the routed experts that have arrived, or None if they were not requested.
    """

    __slots__ = (
        "begun",
        "chunks",
        "decode",
        "future",
        "logprobs",
        "on_chunk",
        "prepared",
        "prompt",
        "resumed_at",
        "routed",
        "top",
    )

    def __init__(
        self,
        decode: Decode,
        future: asyncio.Future[Completion],
        prompt: bytes,
        prepared: Prepared,
        logprobs: bool,
        top: int,
        on_chunk: OnChunk | None = None,
        routed: RoutedRows | None = None,
    ) -> None:
        self.decode = decode
        self.future = future
        self.on_chunk = on_chunk
        self.prompt = prompt
        self.prepared = prepared
        self.logprobs = logprobs
        self.top = top
        self.chunks: list[TokenChunk] | None = None
        self.resumed_at: tuple[int, ...] = ()
        self.begun: Completion | None = None
        self.routed = routed

    def chunk(self, item: Item, frames: Sequence[Buffer]) -> None:
        if self.future.done():
            return
        try:
            chunk = self.checked(item, frames)
        except ProtocolError as error:
            self.future.set_exception(error)
            return
        if self.chunks is None:
            self.chunks = []
        self.chunks.append(chunk)
        if self.on_chunk is not None:
            self.on_chunk(chunk)

    def checked(self, item: Item, frames: Sequence[Buffer]) -> TokenChunk:
        """Decode a chunk, check its contents and keep its routed experts.

        Raises:
            ProtocolError: the chunk is malformed, or lacks requested logprobs, sampling masks or
                routed experts of a token.
        """
        try:
            chunk = _decode_chunk(item.body)
        except MALFORMED as error:
            raise _malformed(error) from None
        size = len(chunk.ids)
        if size % 4:
            raise _malformed("its arrays are cut off")
        if self.logprobs and len(chunk.logprobs) != size:
            raise _malformed("tokens without logprobs")
        if self.top and not len(chunk.top_ids) == len(chunk.top_logprobs) == self.top * size:
            raise _malformed("tokens without logprobs")
        params = self.prepared.params
        if len(chunk.given_logprobs) != len(params.token_ids_logprob) * size:
            raise _malformed("tokens without the logprobs of given token ids")
        if params.return_hidden_states and size:
            states = len(chunk.hidden_states)
            if not states or states % size:
                raise _malformed("tokens without hidden states")
        if params.return_sampling_mask and not is_whole(chunk):
            raise _malformed("tokens without sampling masks")
        if self.routed is not None:
            self.routed.add(chunk, frames)
        return chunk

    def restart(self, call: Call) -> None:
        if self.chunks is not None:
            self.resumed_at += (resume(call, self.chunks),)

    def end(self, call: Call, outcome: Item | SglrlError, frames: Sequence[Buffer]) -> None:
        future = self.future
        if future.done():
            return
        if isinstance(outcome, Item) and outcome.kind == _DONE:
            try:
                last = self.checked(outcome, frames)
                chunks = (last,) if self.chunks is None else (*self.chunks, last)
                self.check_end(chunks)
            except ProtocolError as error:
                future.set_exception(error)
                return
            if self.on_chunk is not None:
                self.on_chunk(last)
            future.set_result(self.completion(call, chunks))
        else:
            future.set_exception(error_of(outcome) if isinstance(outcome, Item) else outcome)

    def check_end(self, chunks: Sequence[TokenChunk]) -> None:
        """Raise ``ProtocolError`` if a finished call lacks routed experts."""
        if self.routed is not None:
            sampled = sum(len(chunk.ids) for chunk in chunks) // 4
            self.routed.check_end(len(self.prompt) // 4 + sampled, sampled)

    def completion(self, call: Call, chunks: Sequence[TokenChunk]) -> Completion:
        ended = now()
        worker, attempts = call.worker, call.attempts
        resumed = attempts - 1 if attempts else 0
        submitted, sent, first = call.submitted_at, call.sent_at or ended, call.first_at
        begun = self.begun
        if begun is not None:
            resumed += begun.resumed
            submitted = begun.submitted_at
            if begun.worker >= 0:
                # The begun completion was sent to a worker, so use the time when it was sent.
                sent = begun.sent_at
            if len(begun.output_ids):
                first = begun.first_at or begun.finished_at
        return Completion(
            -1 if worker is None else worker.index,
            resumed,
            self.prompt,
            chunks,
            self.logprobs,
            self.top,
            submitted,
            sent,
            first,
            ended,
            self.decode,
            self.prepared.params,
            self.resumed_at,
            (call.args.lora or None) if isinstance(call.args, GenerateArgs) else None,
            self.routed,
        )


class _WholeReply:
    """Resolves a future with the result of a call whose answer is a single item."""

    __slots__ = ("future",)

    def __init__(self, future: asyncio.Future[Any]) -> None:
        self.future = future

    def made(self, call: Call, chunk: TokenChunk, frames: Sequence[Buffer]) -> Any:
        """Return the result.

        Raises:
            ProtocolError: the answer does not match the request.
            EngineError: logits were NaN.
        """
        raise NotImplementedError

    def chunk(self, item: Item, frames: Sequence[Buffer]) -> None:
        """Ignore the chunk, because the whole answer arrives in ``end``."""

    def restart(self, call: Call) -> None:
        """Do nothing, because no part of the answer has arrived yet."""

    def end(self, call: Call, outcome: Item | SglrlError, frames: Sequence[Buffer]) -> None:
        if self.future.done():
            return
        if not isinstance(outcome, Item):
            self.future.set_exception(outcome)
        elif outcome.kind != _DONE:
            self.future.set_exception(error_of(outcome))
        else:
            try:
                made = self.made(call, chunk_of(outcome), frames)
            except (ProtocolError, EngineError) as error:
                self.future.set_exception(error)
            else:
                self.future.set_result(made)


class ScoreReply(_WholeReply):
    """Resolves a future with the result of ``score``.

    Attributes:
        count: the number of scored tokens.
        top: the number of most likely tokens per position. If it is 0, the result is
            ``ScoreLogprobs``, otherwise ``Scores``.
        lora: whether a LoRA adapter computes the score.
    """

    __slots__ = ("count", "lora", "top")

    def __init__(
        self, future: asyncio.Future[Any], count: int, top: int, lora: bool = False
    ) -> None:
        super().__init__(future)
        self.count = count
        self.top = top
        self.lora = lora

    def made(
        self, call: Call, chunk: TokenChunk, frames: Sequence[Buffer]
    ) -> ScoreLogprobs | Scores:
        count, top = self.count, self.top
        if len(chunk.logprobs) != 4 * count:
            raise ProtocolError(
                f"the worker sent {len(chunk.logprobs) // 4} logprobs of {count} tokens"
            )
        array = np.frombuffer(chunk.logprobs, dtype="<f4")
        loras = _spans(chunk.lora_parts, chunk.lora_version, count) if self.lora else ()
        logprobs = ScoreLogprobs(array, _spans(chunk.parts, chunk.version, count), loras)
        if count > 1:
            # A NaN in the KV cache makes all later positions NaN, so check only the last one.
            _check_number(array[-1], chunk.version)
        if not top:
            return logprobs
        return Scores(logprobs, *_top_of(chunk, (count, top)))


class NextTokenReply(_WholeReply):
    """Resolves a future with ``NextTokenLogprobs``.

    Attributes:
        top_k: the number of most likely tokens to return, or 0 for all tokens.
        vocab_size: the number of all tokens.
    """

    __slots__ = ("top_k", "vocab_size")

    def __init__(self, future: asyncio.Future[Any], top_k: int, vocab_size: int) -> None:
        super().__init__(future)
        self.top_k = top_k
        self.vocab_size = vocab_size

    def made(self, call: Call, chunk: TokenChunk, frames: Sequence[Buffer]) -> NextTokenLogprobs:
        ids: NDArray[np.int32] | None = None
        if self.top_k:
            ids, logprobs = _top_of(chunk, (self.top_k,))
        elif len(frames) == 1 and len(frames[0]) == 4 * self.vocab_size:
            logprobs = np.frombuffer(frames[0], dtype="<f4")
        else:
            raise ProtocolError(
                f"the worker sent no logprobs of the {self.vocab_size} tokens that there are"
            )
        # A single NaN logit makes all logprobs NaN, so check only the first one.
        _check_number(logprobs[0], chunk.version)
        return NextTokenLogprobs(
            logprobs,
            ids,
            chunk.version,
            chunk.cached_tokens,
            call.worker.index,  # type: ignore[union-attr]
            chunk.lora_version,
        )


def _spans(parts: bytes, version: int, count: int) -> tuple[VersionSpan, ...]:
    """Return the version spans of a score of ``count`` tokens.

    Args:
        parts, version: the fields of the score's ``TokenChunk``.

    Raises:
        ProtocolError: the parts of the score do not add up to ``count`` tokens.
    """
    if not parts:
        return (VersionSpan(0, count, version),)
    spans: list[VersionSpan] = []
    begin = 0
    if len(parts) % 8 == 0:
        for tokens, version in np.frombuffer(parts, dtype="<i4").reshape(-1, 2).tolist():
            spans.append(VersionSpan(begin, begin + tokens, version))
            begin += tokens
    if begin != count or any(span.stop <= span.start for span in spans):
        raise ProtocolError(f"the worker sent a score of {count} tokens in other parts")
    return tuple(spans)


def _check_number(logprob: np.float32, version: int) -> None:
    if logprob != logprob:
        raise EngineError(NOT_FINITE.format(version))


def _top_of(
    chunk: TokenChunk, shape: tuple[int, ...]
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Return the ids and logprobs of the most likely tokens."""
    if not len(chunk.top_ids) == len(chunk.top_logprobs) == 4 * math.prod(shape):
        raise ProtocolError("the worker did not send the likeliest tokens as asked")
    ids = np.frombuffer(chunk.top_ids, dtype="<i4").reshape(shape)
    return ids, np.frombuffer(chunk.top_logprobs, dtype="<f4").reshape(shape)


class ChunkReply:
    """Queues the chunks of a call for the coroutine that streams them."""

    __slots__ = ("generation", "items", "outcome", "received", "waiter")

    def __init__(self, generation: GenerationReply) -> None:
        self.generation = generation
        self.items: list[TokenChunk] = []
        self.received: list[TokenChunk] = []
        self.outcome: Item | SglrlError | None = None
        self.waiter: asyncio.Future[None] | None = None

    def _wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    def chunk(self, item: Item, frames: Sequence[Buffer]) -> None:
        self._add(item, frames)
        self._wake()

    def _add(self, item: Item, frames: Sequence[Buffer]) -> None:
        if self.outcome is not None:
            return
        try:
            chunk = self.generation.checked(item, frames)
            if item.kind == _DONE:
                self.generation.check_end([*self.received, chunk])
        except ProtocolError as error:
            self.outcome = error
        else:
            self.items.append(chunk)
            self.received.append(chunk)

    def restart(self, call: Call) -> None:
        if self.received:
            self.generation.resumed_at += (resume(call, self.received),)

    def end(self, call: Call, outcome: Item | SglrlError, frames: Sequence[Buffer]) -> None:
        if isinstance(outcome, Item) and outcome.kind == _DONE:
            self._add(outcome, frames)
        if self.outcome is None:
            self.outcome = outcome
        self._wake()
