"""The immutable results of calls to an engine. Their arrays are views of the received bytes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..errors import InvalidRequest
from ..wire.engine import TokenChunk
from .display import html, preview
from .message import AssistantMessage, ToolCall
from .routed_experts import RoutedRows
from .sampling import SamplingParams
from .sampling_mask import SamplingMask, mask_of

Decode = Callable[[Sequence[int], bool], str]
"""A function ``decode(token_ids, skip_special_tokens)`` that returns text."""


class VersionSpan(NamedTuple):
    """The policy version of the tokens ``start`` to ``stop`` (exclusive).

    The forward pass that computed the logits of these tokens used the weights of ``version``.
    """

    start: int
    stop: int
    version: int


class Timing(NamedTuple):
    """The durations of a call, in seconds from its submission.

    Attributes:
        queued: the time until the call was sent to a worker.
        first_token: the time until the first token arrived in this process. It equals ``total`` if
            all tokens came in one message.
        total: the time until the end of the call.
    """

    queued: float
    first_token: float
    total: float


class TopLogprobs(NamedTuple):
    """The k most likely tokens at each output position, most likely first.

    Attributes:
        ids: int32 [t, k].
        logprobs: float32 [t, k], in descending order.
    """

    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]

    def __repr__(self) -> str:
        return f"<TopLogprobs of {len(self.ids)} tokens, top {self.ids.shape[1]}>"


class ScoreLogprobs(np.ndarray[Any, np.dtype[np.float32]]):
    """The result of ``score``: logprobs of given tokens, as a numpy array float32 [n].

    Slices, copies and other arrays that are computed from this array have no versions.

    Attributes:
        versions: the spans of positions with the same policy version, in order.
        lora_versions: the spans of positions with the same version of the LoRA adapter. Empty
            without a LoRA adapter.
    """

    versions: tuple[VersionSpan, ...]
    lora_versions: tuple[VersionSpan, ...]

    def __new__(
        cls,
        logprobs: NDArray[np.float32],
        versions: tuple[VersionSpan, ...],
        lora_versions: tuple[VersionSpan, ...] = (),
    ) -> ScoreLogprobs:
        made = logprobs.view(cls)
        made.versions = versions
        made.lora_versions = lora_versions
        return made

    @property
    def version(self) -> int:
        """The weight version at the launch of the forward pass for the last position.

        All positions have this version unless ``versions`` has several spans.
        """
        return self.versions[-1].version

    def __reduce__(self) -> tuple[Any, ...]:
        # numpy's own __reduce__ would lose the versions.
        array, versions = np.array(self), self.__dict__.get("versions")
        if versions is None:
            return np.array, (array,)
        return ScoreLogprobs, (array, versions, self.__dict__.get("lora_versions", ()))


class _Scores(NamedTuple):
    logprobs: ScoreLogprobs
    top_ids: NDArray[np.int32]
    top_logprobs: NDArray[np.float32]


class Scores(_Scores):
    """The result of ``score(..., top_logprobs=k)``: logprobs of n given tokens.

    Position 0 of a text has no context, so its ``top_ids`` are -1 and its logprobs are NaN.

    Attributes:
        logprobs: float32 [n], the logprobs of the given tokens.
        top_ids: int32 [n, k], the most likely tokens at each position, most likely first.
        top_logprobs: float32 [n, k], the logprobs of ``top_ids``.
    """

    __slots__ = ()

    @property
    def version(self) -> int:
        """See ``ScoreLogprobs.version``."""
        return self.logprobs.version

    @property
    def versions(self) -> tuple[VersionSpan, ...]:
        """The spans of positions with the same policy version, in order."""
        return self.logprobs.versions

    @property
    def lora_versions(self) -> tuple[VersionSpan, ...]:
        """See ``ScoreLogprobs.lora_versions``."""
        return self.logprobs.lora_versions

    def __repr__(self) -> str:
        return f"<Scores of {len(self.logprobs)} tokens, top {self.top_ids.shape[1]}>"


class NextTokenLogprobs(NamedTuple):
    """The distribution of the next token after a prompt, at temperature 1.

    Attributes:
        logprobs: float32 [vocabulary size], indexed by token id. With ``top_k``: float32 [k], most
            likely first. Read-only.
        token_ids: int32 [k], the tokens of ``logprobs``, or None if ``logprobs`` has all tokens.
        version: the weight version at the launch of the forward pass that computed the
            distribution.
        cached_tokens: the number of prompt tokens that came from the prefix cache.
        worker: the index of the worker that computed the distribution.
        lora_version: the version of the LoRA adapter, or 0 without one.
    """

    logprobs: NDArray[np.float32]
    token_ids: NDArray[np.int32] | None
    version: int
    cached_tokens: int
    worker: int
    lora_version: int = 0

    def __repr__(self) -> str:
        what = "all" if self.token_ids is None else "the likeliest"
        return (
            f"<NextTokenLogprobs of {what} {len(self.logprobs):,} tokens, version {self.version}, "
            f"worker={self.worker}, cached={self.cached_tokens}>"
        )


class Conversation(msgspec.Struct, gc=False, eq=False):
    """One buffer with the tokens of a conversation, int32. The prompts of all turns share it.

    Tokens are only appended, so the prompt of every turn is a prefix of ``tokens``. A copy for each
    turn would take memory quadratic in the number of turns.
    """

    tokens: bytes = b""


class Beginning(msgspec.Struct, gc=False, frozen=True, eq=False):
    """A prefix of a conversation: the first ``nbytes`` bytes of its tokens."""

    conversation: Conversation
    nbytes: int


class Completion(msgspec.Struct, frozen=True, dict=True, weakref=True, eq=False):
    """One sampled continuation of one prompt.

    A completion holds the received chunks. Arrays, text and other values are computed on first use.

    Attributes:
        worker: the index of the worker that finished the call. -1: the call was aborted while it
            waited for a worker.
        resumed: the number of workers that were lost while they held the call.
        resumed_at: the output positions at which another worker continued. That worker recomputed
            the KV cache of all earlier tokens with its own weights.
        lora: the name of the LoRA adapter, or None.
        params: the sampling parameters of the call.
        prompt, chunks, wants_logprobs, top_count, routed_rows, decode: the prompt, the received
            data and the options of the call, from which the properties are computed.
        submitted_at, sent_at, first_at, finished_at: times on the driver's clock, in seconds.
            ``first_at`` is 0 if all tokens came in the last message.
    """

    worker: int
    resumed: int
    prompt: bytes | Beginning
    chunks: Sequence[TokenChunk]
    wants_logprobs: bool
    top_count: int
    submitted_at: float
    sent_at: float
    first_at: float
    finished_at: float
    decode: Decode
    params: SamplingParams
    resumed_at: tuple[int, ...] = ()
    lora: str | None = None
    routed_rows: RoutedRows | None = None

    @property
    def finish_reason(self) -> str:
        """The reason why the output ended: "stop", "length" or "abort".

        "stop" means an end-of-sequence token, a stop token or a stop string. "abort" means
        ``Client.abort``, ``pause(mode="abort")`` or a weight update with inflight="abort".
        """
        return self.chunks[-1].finish

    @property
    def stop_match(self) -> str | int | None:
        """The stop string or token id that ended the output, or None."""
        return self.chunks[-1].stop_match

    @property
    def cached_tokens(self) -> int:
        """The number of prompt tokens that came from the prefix cache."""
        return self.chunks[-1].cached_tokens

    @property
    def prompt_tokens(self) -> int:
        """The number of tokens in the prompt."""
        prompt = self.prompt
        return (prompt.nbytes if isinstance(prompt, Beginning) else len(prompt)) // 4

    @cached_property
    def versions(self) -> tuple[VersionSpan, ...]:
        """The spans of output tokens with the same policy version, in order, without gaps."""
        return version_spans(self.chunks)

    @cached_property
    def lora_versions(self) -> tuple[VersionSpan, ...]:
        """The spans of output tokens with the same version of the LoRA adapter. Empty without one.

        The spans may differ from the spans of ``versions``. Both versions together identify the
        policy that sampled a token.
        """
        return () if self.lora is None else version_spans(self.chunks, lora=True)

    @cached_property
    def timing(self) -> Timing:
        """The durations of the call, as ``Timing``."""
        return Timing(
            self.sent_at - self.submitted_at,
            (self.first_at or self.finished_at) - self.submitted_at,
            self.finished_at - self.submitted_at,
        )

    @cached_property
    def prompt_ids(self) -> NDArray[np.int32]:
        """The tokens of the prompt, int32 [prompt length], read-only."""
        prompt = self.prompt
        if isinstance(prompt, Beginning):
            return np.frombuffer(prompt.conversation.tokens, "<i4", prompt.nbytes // 4)
        return np.frombuffer(prompt, dtype="<i4")

    @cached_property
    def output_ids(self) -> NDArray[np.int32]:
        """The output tokens, int32 [t], read-only. They include the stop token or stop string."""
        return np.frombuffer(b"".join([c.ids for c in self.chunks]), dtype="<i4")

    @cached_property
    def logprobs(self) -> NDArray[np.float32] | None:
        """Logprobs of the output tokens, float32 [t], read-only. None unless requested.

        A logprob is the natural log of the token's probability. ``logprobs_mode`` selects the
        distribution (see ``SamplingParams``). The default is "scaled_logprobs": temperature,
        penalties, ``logit_bias`` and grammar are applied, and top-p, top-k and min-p are not. With
        temperature 0, the logprobs are computed at temperature 1.
        """
        if not self.wants_logprobs:
            return None
        return np.frombuffer(b"".join([c.logprobs for c in self.chunks]), dtype="<f4")

    @cached_property
    def top_logprobs(self) -> TopLogprobs | None:
        """The most likely tokens at each output position. None unless requested.

        The values are of the same distribution as ``logprobs``. If this distribution excludes a
        token, its logprob is the most negative finite float32.
        """
        k = self.top_count
        if not k:
            return None
        return TopLogprobs(
            np.frombuffer(b"".join([c.top_ids for c in self.chunks]), "<i4").reshape(-1, k),
            np.frombuffer(b"".join([c.top_logprobs for c in self.chunks]), "<f4").reshape(-1, k),
        )

    @cached_property
    def token_ids_logprobs(self) -> NDArray[np.float32] | None:
        """Logprobs of the k tokens of ``token_ids_logprob``, float32 [t, k]. None unless requested.

        The values are of the same distribution as ``logprobs``. If this distribution excludes a
        token, its logprob is the most negative finite float32.
        """
        return given_logprobs(self.chunks, self.params)

    @cached_property
    def hidden_states(self) -> NDArray[np.float32] | None:
        """The hidden state that each token was sampled from, float32 [t, hidden size].

        This is the output of the last layer, after the last norm. Its product with the output
        embeddings gives the logits. None unless requested with ``return_hidden_states``.
        """
        return hidden_states(self.chunks, self.params)

    @cached_property
    def sampling_mask(self) -> SamplingMask | None:
        """The tokens that could be drawn at each position. None unless requested.

        Limits (top-p, top-k, min-p), grammar, ``logit_bias`` and ``min_new_tokens`` are applied.
        """
        return mask_of(self.chunks) if self.params.return_sampling_mask else None

    @cached_property
    def routed_experts(self) -> NDArray[Any] | None:
        """The experts that tokens were routed to, uint8 or int16 [n, layers, k], read-only.

        Row i belongs to position ``routed_from + i`` of prompt and output. The last token has no
        row, because it was never an input of a forward pass. None unless requested.
        """
        return None if self.routed_rows is None else self.routed_rows.array()

    @property
    def routed_from(self) -> int:
        """The position of the first row of ``routed_experts``.

        In a later turn of a session, this is the first position for which no earlier turn has a
        row. Otherwise it is 0.
        """
        return 0 if self.routed_rows is None else self.routed_rows.start

    @cached_property
    def text(self) -> str:
        """The output as text, decoded on first use.

        The stop token or stop string at its end is removed, unless ``no_stop_trim`` is set.
        """
        return cut_text(
            self.output_ids,
            self.finish_reason,
            self.stop_match,
            self.decode,
            self.params,
        )

    @property
    def message(self) -> AssistantMessage:
        """The output as a message of the assistant.

        If the call or the session has a renderer, reasoning and tool calls are parsed from the
        tokens. Without a renderer, all text is ``content``.
        """
        parsed: AssistantMessage | None = self.__dict__.get("message")
        return AssistantMessage(content=self.text) if parsed is None else parsed

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The tool calls in ``message``, including calls that are not valid."""
        return self.message.tool_calls

    def __repr__(self) -> str:
        lost = f", resumed={self.resumed}" if self.resumed else ""
        text = ""
        # Without a tokenizer there is no text.
        with contextlib.suppress(InvalidRequest):
            text = f"{preview(self.text)}, "
        return (
            f"<Completion {text}{self.prompt_tokens} prompt + {len(self.output_ids)} new tokens, "
            f"finish_reason={self.finish_reason!r}, worker={self.worker}, "
            f"cached={self.cached_tokens}, {self.timing.total * 1000:.1f} ms{lost}>"
        )

    def _repr_html_(self) -> str | None:
        try:
            prompt = self.decode(self.prompt_ids.tolist(), False)
            return html(repr(self), [("prompt", prompt), ("sampled", self.text)])
        except InvalidRequest:
            return None


def cut_text(
    ids: NDArray[np.int32],
    finish_reason: str,
    stop_match: str | int | None,
    decode: Decode,
    params: SamplingParams,
) -> str:
    """Decode output ids and cut the text at the stop token or stop string.

    The stop token or stop string is removed too, unless ``no_stop_trim`` is set.
    """
    tokens = ids.tolist()
    skip = params.skip_special_tokens
    if finish_reason != "stop" or not tokens:
        return decode(tokens, skip)
    if isinstance(stop_match, int):
        return decode(tokens if params.no_stop_trim else tokens[:-1], skip)
    text = decode(tokens, skip)
    if isinstance(stop_match, str) and stop_match in params.stop_strings:
        # The last token completed the stop string. So search only for an occurrence that ends in
        # the text of this token. The engine did not stop at earlier occurrences. Without the
        # last token, the text may end with an incomplete character, which is stripped.
        before = decode(tokens[:-1], skip).rstrip("\ufffd")
        at = text.find(stop_match, max(0, len(before) - len(stop_match) + 1))
        if at >= 0:
            text = text[: at + len(stop_match) if params.no_stop_trim else at]
    return text


def given_logprobs(
    chunks: Sequence[TokenChunk], params: SamplingParams
) -> NDArray[np.float32] | None:
    """Return the logprobs of the tokens of ``token_ids_logprob``, float32 [t, k], or None."""
    count = len(params.token_ids_logprob)
    if not count:
        return None
    return np.frombuffer(b"".join([c.given_logprobs for c in chunks]), "<f4").reshape(-1, count)


def hidden_states(
    chunks: Sequence[TokenChunk], params: SamplingParams
) -> NDArray[np.float32] | None:
    """Return the hidden states of the tokens, float32 [t, hidden size], or None."""
    if not params.return_hidden_states:
        return None
    tokens = sum(len(chunk.ids) for chunk in chunks) // 4
    values = np.frombuffer(b"".join([chunk.hidden_states for chunk in chunks]), "<f4")
    return values.reshape(tokens, -1 if tokens else 0)


def version_spans(chunks: Sequence[TokenChunk], *, lora: bool = False) -> tuple[VersionSpan, ...]:
    """Return the spans of tokens with the same policy version in a call's chunks.

    Adjacent spans of the same version are joined.

    Args:
        lora: whether to use the versions of the LoRA adapter instead of the model's versions.
    """
    spans: list[VersionSpan] = []
    at = 0
    for chunk in chunks:
        end = at + len(chunk.ids) // 4
        version = chunk.lora_version if lora else chunk.version
        if spans and spans[-1].version == version:
            spans[-1] = VersionSpan(spans[-1].start, end, version)
        elif end > at:
            spans.append(VersionSpan(at, end, version))
        at = end
    return tuple(spans)
