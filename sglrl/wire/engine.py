"""Arguments and results of the endpoints of an engine worker."""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec


class RoutedShape(NamedTuple):
    """A token's row of routed experts: ``layers`` x ``k`` values.

    dtype: the dtype of the values, uint8 ("|u1") or int16 ("<i2").
    """

    layers: int
    k: int
    dtype: str


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A loaded model. The driver checks requests against it before it sends them.

    Lengths and cache sizes are in tokens.

    accelerations: names of sglrl's accelerations of SGLang that are on.
    tokenizer: folder or name of the tokenizer; "": that of the model.
    max_lora_rank: the largest rank of an adapter; 0: the engine takes no adapters.
    lora_target_modules: the last parts of the names of the modules that adapters may change.
    max_loaded_loras: how many adapters may be loaded; 0: any number.
    sleep_tags: what the engine can give back while it sleeps, of ``SLEEP_TAGS``.
    hidden_size: the size of the states that requests may ask for; 0: they may not.
    routed_experts: the shape and dtype of a token's row of routed experts; None: the engine does
        not return them.
    logit_processors: the names of the declared logit processors ("module:Class").
    """

    model: str
    architecture: str
    dtype: str
    device: str
    vocab_size: int
    context_length: int
    max_prompt_tokens: int
    max_total_tokens: int
    eos_token_ids: list[int]
    kv_cache_tokens: int
    priority_scheduling: bool = False
    sglang_version: str = ""
    tp_size: int = 1
    accelerations: tuple[str, ...] = ()
    tokenizer: str = ""
    max_lora_rank: int = 0
    lora_target_modules: tuple[str, ...] = ()
    max_loaded_loras: int = 0
    sleep_tags: tuple[str, ...] = ()
    hidden_size: int = 0
    routed_experts: RoutedShape | None = None
    logit_processors: tuple[str, ...] = ()


class GenerateArgs(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """Arguments of ``generate``. Answered with ``TokenChunk``.

    input_ids: int32 little-endian [n].
    sampling: msgpack of ``SentSampling``. The client encodes each distinct value once.
    resume: int32 [r], tokens that another worker has already generated for this call. They count
        in every limit, and are not sent back.
    lora: the name of an adapter; "": none.
    routed_from: the first position of prompt and output whose routed experts are wanted.
    resume_rows: rows of routed experts from there on that another worker has already sent.
    """

    input_ids: bytes
    sampling: msgspec.Raw
    logprobs: bool = False
    top_logprobs: int = 0
    stream: bool = False
    priority: int = 0
    resume: bytes = b""
    lora: str = ""
    routed_from: int = 0
    resume_rows: int = 0


class TokenChunk(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """New tokens of one call since its last chunk.

    ids: int32 [t].
    logprobs: float32 [t], or empty.
    top_ids, top_logprobs: int32 and float32 [t, k], or empty.
    version: the version of the weights that sampled all of these tokens.
    finish: "" until the last chunk, then "stop", "length" or "abort".
    stop_match: the stop string or stop token that ended the call.
    parts: only in the answer to ``ScoreArgs``, which has logprobs and no ids. int32 [p, 2]: the
        number of logprobs that one version computed, and that version. Empty if ``version``
        computed all of them.
    mask_ids: int32 [m], the token ids that could be drawn at each position, one position after the
        other; empty if they are not wanted.
    mask_lengths: int32 [t], the number of ids at each position, or empty.
    lora_version: the version of the adapter that sampled all of these tokens.
    lora_parts: like ``parts``, with versions of the adapter. Empty if one version computed all.
    hidden_states: float32 [t, hidden size], or empty.
    given_logprobs: float32 [t, k], the logprobs of the k token ids of ``token_ids_logprob``.
    routed: number of rows of routed experts (``EngineInfo.routed_experts``) in the raw frames of
        the item. They follow the rows of the call's earlier chunks.
    """

    ids: bytes
    logprobs: bytes = b""
    finish: str = ""
    cached_tokens: int = 0
    version: int = 0
    top_ids: bytes = b""
    top_logprobs: bytes = b""
    stop_match: str | int | None = None
    parts: bytes = b""
    mask_ids: bytes = b""
    mask_lengths: bytes = b""
    lora_version: int = 0
    lora_parts: bytes = b""
    given_logprobs: bytes = b""
    hidden_states: bytes = b""
    routed: int = 0


class ScoreArgs(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """Arguments of ``score``. Answered with one ``TokenChunk``.

    input_ids: int32 [n].
    start: the first position whose logprob is wanted.
    top_logprobs: how many of the likeliest tokens are wanted at each position.
    temperature: the logits are divided by it; above 0.
    """

    input_ids: bytes
    start: int = 0
    top_logprobs: int = 0
    priority: int = 0
    temperature: float = 1.0
    lora: str = ""


class NextTokenArgs(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """Arguments of ``next_token_logprobs``: the distribution of the token after ``input_ids``.

    Answered with one ``TokenChunk``. With ``top_k`` it has ``top_ids`` and ``top_logprobs`` of one
    position. Without, one raw frame follows: float32 [vocab_size].

    input_ids: int32 [n].
    top_k: how many of the likeliest tokens are wanted; 0: the whole vocabulary.
    """

    input_ids: bytes
    top_k: int = 0
    priority: int = 0
    lora: str = ""


PAUSE_MODES = ("in_place", "retract", "abort", "drain")
"""See ``Client.pause``."""


SLEEP_TAGS: Final = ("kv_cache", "weights")
"""What an engine can give back while it sleeps."""


class TensorValue(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """A tensor, contiguous.

    name: the name in the checkpoint.
    dtype: the dtype as torch prints it, without "torch.".
    data: a bytearray when it is received, because a tensor needs memory that it may write to.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytearray


RATE_SECONDS: Final = 10.0
"""The window of ``EngineStats.tokens_per_second``."""


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """The load of one engine, and its totals since it was ready.

    running, waiting: requests.
    kv_tokens, kv_capacity: tokens of KV cache, held by running requests and in all.
    prompt_tokens, cached_tokens, generated_tokens: totals. Cached tokens are prompt tokens that
        the prefix cache served.
    uptime: seconds since the engine was ready.
    tokens_per_second: generated tokens per second in the latest ``RATE_SECONDS`` (10) seconds, or
        since the engine was ready if that is less. An engine that was stopped in this time has a
        lower rate. Tokens count when the engine reports them: a request without a stream reports
        several at once.
    draining: whether new requests wait, because an update, a pause or a sleep waits until the
        running ones have ended.
    asleep: what the engine has given back (``Client.sleep``).
    """

    running: int
    waiting: int
    kv_tokens: int
    kv_capacity: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    uptime: float
    tokens_per_second: float
    draining: bool = False
    asleep: tuple[str, ...] = ()

    @property
    def kv_usage(self) -> float:
        """Share of the KV cache in use, 0..1."""
        return self.kv_tokens / self.kv_capacity if self.kv_capacity else 0.0

    @property
    def cache_hit_rate(self) -> float:
        """Prompt tokens served from the prefix cache, as a share of all prompt tokens."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0
