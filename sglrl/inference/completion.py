"""Results of calls to an engine: immutable, with arrays as views of what came in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..wire.engine import TokenChunk
from .sampling import SamplingParams

Decode = Callable[[Sequence[int], bool], str]
"""``decode(token_ids, skip_special_tokens) -> text``"""


class VersionSpan(NamedTuple):
    """Tokens ``start`` to ``stop`` (exclusive) are of policy ``version``: the forward pass which
    computed their logits was launched with these weights."""

    start: int
    stop: int
    version: int


class Timing(NamedTuple):
    """Seconds from submission: until sent to a worker, until the first token arrived here, until
    the end. ``first_token`` equals ``total`` when all tokens came in one message."""

    queued: float
    first_token: float
    total: float


class TopLogprobs(NamedTuple):
    """The k likeliest tokens at each output position. ids: int32 [t, k]; logprobs: float32 [t, k],
    in falling order."""

    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]

    def __repr__(self) -> str:
        return f"<TopLogprobs of {len(self.ids)} tokens, top {self.ids.shape[1]}>"


class ScoreLogprobs(np.ndarray[Any, np.dtype[np.float32]]):
    """Logprobs of given tokens: what ``score`` returns. A numpy array, float32 [n].

    What is computed from it, slices and copies included, is an array without versions.

    Attributes:
        versions: which policy version computed which positions, in order.
    """

    versions: tuple[VersionSpan, ...]

    def __new__(
        cls, logprobs: NDArray[np.float32], versions: tuple[VersionSpan, ...]
    ) -> ScoreLogprobs:
        made = logprobs.view(cls)
        made.versions = versions
        return made

    @property
    def version(self) -> int:
        """Version of the weights that the forward pass for the last position was launched with. It
        is the version of all positions unless ``versions`` has several spans."""
        return self.versions[-1].version

    def __reduce__(self) -> tuple[Any, ...]:
        # numpy's own would lose the versions.
        array, versions = np.array(self), self.__dict__.get("versions")
        if versions is None:
            return np.array, (array,)
        return ScoreLogprobs, (array, versions)


class _Scores(NamedTuple):
    logprobs: ScoreLogprobs
    top_ids: NDArray[np.int32]
    top_logprobs: NDArray[np.float32]


class Scores(_Scores):
    """Of given tokens, at n positions: what ``score(..., top_logprobs=k)`` returns.

    Attributes:
        logprobs: float32 [n], of the given tokens.
        top_ids: int32 [n, k]: the likeliest tokens at each position, likeliest first.
        top_logprobs: float32 [n, k]: their logprobs. Position 0 of a text has no context: ids -1,
            logprobs NaN.
    """

    __slots__ = ()

    @property
    def version(self) -> int:
        """As ``ScoreLogprobs.version``."""
        return self.logprobs.version

    @property
    def versions(self) -> tuple[VersionSpan, ...]:
        """Which policy version computed which positions, in order."""
        return self.logprobs.versions

    def __repr__(self) -> str:
        return f"<Scores of {len(self.logprobs)} tokens, top {self.top_ids.shape[1]}>"


class NextTokenLogprobs(NamedTuple):
    """The distribution of the token behind a prompt, at temperature 1.

    Attributes:
        logprobs: float32 [v], by token id; with ``top_k`` float32 [k], likeliest first. Read-only.
        token_ids: int32 [k], which tokens these are; None: all.
        version: of the weights that the forward pass which computed the distribution was launched
            with.
        cached_tokens: prompt tokens that were served from the prefix cache.
        worker: index of the worker that computed it.
    """

    logprobs: NDArray[np.float32]
    token_ids: NDArray[np.int32] | None
    version: int
    cached_tokens: int
    worker: int

    def __repr__(self) -> str:
        what = "all" if self.token_ids is None else "the likeliest"
        return (
            f"<NextTokenLogprobs of {what} {len(self.logprobs):,} tokens, version {self.version}, "
            f"worker={self.worker}, cached={self.cached_tokens}>"
        )


class Conversation(msgspec.Struct, gc=False, eq=False):
    """The tokens of one so far, int32. Only appended to, so the prompt of every turn is a beginning
    of it: a copy for each would be quadratic in the number of turns."""

    tokens: bytes = b""


class Beginning(msgspec.Struct, gc=False, frozen=True, eq=False):
    """The first ``nbytes`` of a conversation."""

    conversation: Conversation
    nbytes: int


class Completion(msgspec.Struct, frozen=True, dict=True, weakref=True, eq=False):
    """One sampled continuation of one prompt. Made from what came in; everything else, the arrays
    and the text included, is worked out when it is first asked for.

    Attributes:
        worker: index of the worker that finished it; -1: ``abort`` found it waiting for one.
        resumed: how many workers were lost while they held it.
        resumed_at: output positions at which another worker went on; it computed the KV cache of
            everything before anew, with the weights that it had.
    """

    worker: int
    resumed: int
    _prompt: bytes | Beginning
    _chunks: Sequence[TokenChunk]
    _wants_logprobs: bool
    _top_logprobs: int
    _submitted: float
    _sent: float
    _first: float
    _finished: float
    _decode: Decode
    _params: SamplingParams
    resumed_at: tuple[int, ...] = ()

    @property
    def finish_reason(self) -> str:
        """ "stop" (end-of-sequence, a stop token or a stop string), "length", or "abort"
        (``Client.abort``, ``pause(mode="abort")`` or a weight update with inflight="abort" returned
        it)."""
        return self._chunks[-1].finish

    @property
    def stop_match(self) -> str | int | None:
        """The stop string or token id that ended it, if one did."""
        return self._chunks[-1].stop_match

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that came from the prefix cache."""
        return self._chunks[-1].cached_tokens

    @property
    def prompt_tokens(self) -> int:
        """How many the prompt has."""
        prompt = self._prompt
        return (prompt.nbytes if isinstance(prompt, Beginning) else len(prompt)) // 4

    @cached_property
    def versions(self) -> tuple[VersionSpan, ...]:
        """Spans of the policy version over the output tokens, in order, without gaps."""
        return version_spans(self._chunks)

    @cached_property
    def timing(self) -> Timing:
        """See ``Timing``."""
        return Timing(
            self._sent - self._submitted,
            (self._first or self._finished) - self._submitted,
            self._finished - self._submitted,
        )

    @cached_property
    def prompt_ids(self) -> NDArray[np.int32]:
        """int32 [prompt length], read-only."""
        prompt = self._prompt
        if isinstance(prompt, Beginning):
            return np.frombuffer(prompt.conversation.tokens, "<i4", prompt.nbytes // 4)
        return np.frombuffer(prompt, dtype="<i4")

    @cached_property
    def output_ids(self) -> NDArray[np.int32]:
        """int32 [t], read-only; includes the token or the string that ended it."""
        return np.frombuffer(b"".join([c.ids for c in self._chunks]), dtype="<i4")

    @cached_property
    def logprobs(self) -> NDArray[np.float32] | None:
        """float32 [t], read-only: natural log of the probability that the model gave each output
        token. Temperature, penalties and grammar are applied, top-p, top-k and min-p are not; with
        temperature 0 they are those of temperature 1. None unless asked for."""
        if not self._wants_logprobs:
            return None
        return np.frombuffer(b"".join([c.logprobs for c in self._chunks]), dtype="<f4")

    @cached_property
    def top_logprobs(self) -> TopLogprobs | None:
        """None unless asked for."""
        k = self._top_logprobs
        if not k:
            return None
        return TopLogprobs(
            np.frombuffer(b"".join([c.top_ids for c in self._chunks]), "<i4").reshape(-1, k),
            np.frombuffer(b"".join([c.top_logprobs for c in self._chunks]), "<f4").reshape(-1, k),
        )

    @cached_property
    def text(self) -> str:
        """The output as text, without the stop token or stop string that ended it (unless
        ``no_stop_trim``). Decoded when first asked for."""
        return cut_text(
            self.output_ids,
            self.finish_reason,
            self.stop_match,
            self._decode,
            self._params,
        )

    def __repr__(self) -> str:
        lost = f", resumed={self.resumed}" if self.resumed else ""
        return (
            f"<Completion {self.prompt_tokens} prompt + {len(self.output_ids)} new tokens, "
            f"finish_reason={self.finish_reason!r}, worker={self.worker}, "
            f"cached={self.cached_tokens}, {self.timing.total * 1000:.1f} ms{lost}>"
        )


def cut_text(
    ids: NDArray[np.int32],
    finish_reason: str,
    stop_match: str | int | None,
    decode: Decode,
    params: SamplingParams,
) -> str:
    """Text of output ids without the stop token or stop string that ended them, or with no more
    than that (``no_stop_trim``)."""
    tokens = ids.tolist()
    skip = params.skip_special_tokens
    if finish_reason != "stop" or not tokens:
        return decode(tokens, skip)
    if isinstance(stop_match, int):
        return decode(tokens if params.no_stop_trim else tokens[:-1], skip)
    text = decode(tokens, skip)
    if isinstance(stop_match, str) and stop_match in params.stop_strings:
        # The last token completed it, so it ends after the text of the others; what that text has
        # of an incomplete character does not count. An earlier occurrence was passed over.
        before = decode(tokens[:-1], skip).rstrip("\ufffd")
        at = text.find(stop_match, max(0, len(before) - len(stop_match) + 1))
        if at >= 0:
            text = text[: at + len(stop_match) if params.no_stop_trim else at]
    return text


class Chunk(msgspec.Struct, frozen=True, dict=True, eq=False):
    """New tokens of a stream since the chunk before.

    Attributes:
        finish_reason: None until the last chunk, then as in ``Completion``.
        version: policy version of these tokens.
    """

    finish_reason: str | None
    version: int
    _ids: bytes
    _logprobs: bytes | None
    _text: Callable[[], str]

    @cached_property
    def output_ids(self) -> NDArray[np.int32]:
        """int32 [t], read-only."""
        return np.frombuffer(self._ids, dtype="<i4")

    @cached_property
    def logprobs(self) -> NDArray[np.float32] | None:
        """float32 [t], read-only; None unless asked for."""
        return None if self._logprobs is None else np.frombuffer(self._logprobs, dtype="<f4")

    @property
    def text(self) -> str:
        """The text these tokens add. Characters that are not complete yet, or that may turn out to
        be the beginning of a stop string, come with a later chunk: the texts of all chunks joined
        are ``Completion.text``."""
        return self._text()

    def __repr__(self) -> str:
        return f"<Chunk {len(self._ids) // 4} tokens, finish_reason={self.finish_reason!r}>"


class StreamText:
    """Splits the text of a growing token list into what each chunk adds.

    Only the tail is decoded again: text is final up to the last position where the decoder had no
    incomplete character, which is how SGLang's and vLLM's detokenizers bound the work.
    """

    def __init__(self, decode: Decode, params: SamplingParams) -> None:
        self._decode = decode
        self._params = params
        self._stops = params.stop_strings
        self._skip = params.skip_special_tokens
        self._chunks: list[tuple[bytes, str, str | int | None]] = []
        self._texts: list[str] = []
        self._ids: list[int] = []
        self._prefix = 0
        self._read = 0
        self._emitted = 0
        self._pending = ""

    def add(self, chunk: TokenChunk) -> Callable[[], str]:
        """Note a chunk; its text is worked out when the returned function is first called."""
        index = len(self._chunks)
        self._chunks.append((chunk.ids, chunk.finish, chunk.stop_match))
        return lambda: self._text_of(index)

    def _text_of(self, index: int) -> str:
        while len(self._texts) <= index:
            self._texts.append(self._advance(*self._chunks[len(self._texts)]))
        return self._texts[index]

    def _advance(self, ids: bytes, finish: str, stop_match: str | int | None) -> str:
        new = np.frombuffer(ids, dtype="<i4")
        self._ids += new.tolist()
        if finish:
            whole = cut_text(
                np.array(self._ids, dtype=np.int32), finish, stop_match, self._decode, self._params
            )
            return whole[self._emitted :]
        before = self._decode(self._ids[self._prefix : self._read], self._skip)
        whole = self._decode(self._ids[self._prefix :], self._skip)
        # The window moves on only over text, never to stand empty or on skipped special tokens:
        # some decoders drop the space in front of the first word they see.
        if len(whole) > len(before) and not whole.endswith("\ufffd"):
            self._pending += whole[len(before) :]
            self._prefix, self._read = self._read, len(self._ids)
        keep = self._held_back()
        text = self._pending[: len(self._pending) - keep]
        self._pending = self._pending[len(self._pending) - keep :]
        self._emitted += len(text)
        return text

    def _held_back(self) -> int:
        """Characters at the end that could be the beginning of a stop string."""
        longest = 0
        for stop in self._stops:
            for size in range(min(len(stop), len(self._pending)), longest, -1):
                if self._pending.endswith(stop[:size]):
                    longest = size
                    break
        return longest


def version_spans(chunks: Sequence[TokenChunk]) -> tuple[VersionSpan, ...]:
    """The policy versions over the tokens of a call's chunks, equal neighbours joined."""
    spans: list[VersionSpan] = []
    at = 0
    for chunk in chunks:
        end = at + len(chunk.ids) // 4
        if spans and spans[-1].version == chunk.version:
            spans[-1] = VersionSpan(spans[-1].start, end, chunk.version)
        elif end > at:
            spans.append(VersionSpan(at, end, chunk.version))
        at = end
    return tuple(spans)
