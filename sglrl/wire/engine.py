"""Arguments and results of the endpoints of an engine worker."""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec


class RoutedShape(NamedTuple):
    """The shape of a token's row of routed experts.

    layers: number of layers that route tokens to experts.
    k: number of experts for each token and layer.
    dtype: the dtype of the values, uint8 ("|u1") or int16 ("<i2").
    """

    layers: int
    k: int
    dtype: str


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A loaded model and its engine. The driver checks requests against it before it sends them.

    Lengths and cache sizes are in tokens.

    Attributes:
        accelerations: names of sglrl's accelerations of SGLang that are on.
        tokenizer: folder or name of the tokenizer. "": the tokenizer of the model.
        max_lora_rank: maximum rank of a LoRA adapter. 0: the engine takes no LoRA adapters.
        lora_target_modules: the last parts of the names of the modules that adapters may change.
        max_loaded_loras: maximum number of loaded adapters. 0: no limit.
        sleep_tags: the resources that the engine can release while it sleeps, from ``SLEEP_TAGS``.
        hidden_size: the size of the hidden states that requests may ask for. 0: requests may not
            ask for hidden states.
        routed_experts: the shape and dtype of a token's row of routed experts. None: the engine
            does not return them.
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
    """Arguments of ``generate``, which is answered with ``TokenChunk``.

    input_ids: the prompt, as little-endian int32 [n].
    sampling: msgpack of ``SentSampling``. The client encodes each distinct value once.
    resume: int32 [r], tokens that another worker has already generated for this call. They count
        in every limit, and are not sent back.
    lora: the name of an adapter, or "" for the model itself.
    routed_from: the first position of prompt and output whose routed experts are requested.
    resume_rows: number of rows of routed experts that another worker has already sent. The first of
        them is the row of ``routed_from``.
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

    ids: int32 [t], the token ids.
    logprobs: float32 [t], the logprobs of the tokens, or empty.
    top_ids, top_logprobs: int32 and float32 [t, k], the likeliest tokens of each position, or
        empty.
    version: the version of the weights that sampled all of these tokens.
    finish: "" until the last chunk, then "stop", "length" or "abort".
    stop_match: the stop string or stop token that ended the call.
    parts: int32 [p, 2], pairs of a number of logprobs and the version of the weights that computed
        them. Empty if ``version`` computed all of them. Only answers to ``ScoreArgs`` have parts.
        These answers have logprobs, but no ids.
    mask_ids: int32 [m], the token ids that could be drawn at each position, one position after the
        other, or empty.
    mask_lengths: int32 [t], the number of ids in ``mask_ids`` for each position, or empty.
    lora_version: the version of the LoRA adapter that sampled all of these tokens.
    lora_parts: like ``parts``, with versions of the LoRA adapter. Empty if ``lora_version``
        computed all logprobs.
    hidden_states: float32 [t, hidden size], or empty.
    given_logprobs: float32 [t, k], the logprobs of the k token ids of ``token_ids_logprob``.
    routed: number of rows of routed experts (``EngineInfo.routed_experts``) in the raw frames of
        the item. They continue the rows of the call's earlier chunks.
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
    """Arguments of ``score``, which is answered with one ``TokenChunk``.

    input_ids: int32 [n], the tokens to score.
    start: the first position whose logprob is requested.
    top_logprobs: number of likeliest tokens to return for each position.
    temperature: the divisor of the logits, greater than 0.
    """

    input_ids: bytes
    start: int = 0
    top_logprobs: int = 0
    priority: int = 0
    temperature: float = 1.0
    lora: str = ""


class NextTokenArgs(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """Arguments of ``next_token_logprobs``: the distribution of the token after ``input_ids``.

    The answer is one ``TokenChunk``. With ``top_k``, it has ``top_ids`` and ``top_logprobs`` for
    one position. Without ``top_k``, it has one raw frame with float32 [vocab_size].

    input_ids: int32 [n], the tokens before the requested position.
    top_k: number of likeliest tokens to return. 0: the whole vocabulary.
    """

    input_ids: bytes
    top_k: int = 0
    priority: int = 0
    lora: str = ""


PAUSE_MODES = ("in_place", "retract", "abort", "drain")
"""The modes of ``Client.pause``, which describes them."""


SLEEP_TAGS: Final = ("kv_cache", "weights")
"""The kinds of GPU memory that an engine can release while it sleeps."""


class TensorValue(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """A contiguous tensor with its data.

    name: the name in the checkpoint.
    dtype: the dtype as torch prints it, without "torch.".
    data: the bytes of the tensor. The receiver gets a bytearray, because a tensor needs writable
        memory.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytearray


RATE_SECONDS: Final = 10.0
"""The window of ``EngineStats.tokens_per_second``."""


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """The load of one engine, and its totals since it was ready.

    Attributes:
        running: number of running requests.
        waiting: number of waiting requests.
        kv_tokens: number of tokens in the KV cache that running requests hold.
        kv_capacity: number of tokens for which the KV cache has room.
        prompt_tokens: total number of prompt tokens.
        cached_tokens: total number of prompt tokens that the prefix cache served.
        generated_tokens: total number of generated tokens.
        uptime: seconds since the engine was ready.
        tokens_per_second: generated tokens per second in the latest ``RATE_SECONDS`` (10) seconds,
            or since the engine was ready, if that is a shorter time. The time counts even while the
            engine was stopped. Tokens count when the engine reports them. A request without a
            stream reports several tokens at once.
        draining: whether new requests wait, because an update, a pause or a sleep waits until the
            running requests have ended.
        asleep: the resources that the engine has released (``Client.sleep``).
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
        """Share of the prompt tokens that the prefix cache served, 0..1."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0
