"""Make completions of turns that have not ended, were aborted, or have no tokens."""

from __future__ import annotations

from collections.abc import Sequence

from ..driver.driver import now
from ..inference.completion import Completion
from ..inference.sampling import SamplingParams
from ..sessions.session_spec import SessionSpec
from ..wire.engine import TokenChunk


def unfinished(
    spec: SessionSpec,
    prompt: bytes,
    chunks: Sequence[TokenChunk],
    params: SamplingParams,
    top_logprobs: int,
    began: float,
) -> Completion:
    """Return the tokens of a turn so far as a completion.

    Args:
        spec: the spec of the turn's session.
        prompt: the token ids of the prompt, int32.
        chunks: the tokens so far, at least one chunk.
        params: the sampling parameters of the turn.
        top_logprobs: number of likeliest tokens at each position.
        began: the time at which the turn was submitted, on the driver's clock.
    """
    return Completion(
        worker=-1,
        resumed=0,
        prompt=prompt,
        chunks=tuple(chunks),
        wants_logprobs=True,
        top_count=top_logprobs,
        submitted_at=began,
        sent_at=began,
        first_at=0.0,
        finished_at=now(),
        decode=spec.requests.decode,
        params=params,
        lora=spec.options.lora,
    )


def aborted(
    spec: SessionSpec,
    prompt: bytes,
    chunks: Sequence[TokenChunk],
    params: SamplingParams,
    top_logprobs: int,
    began: float,
) -> Completion:
    """Return the tokens of an aborted turn as a completion with the ``finish_reason`` "abort".

    The arguments are as for ``unfinished``, but there may be no chunks.
    """
    cached = chunks[-1].cached_tokens if chunks else 0
    end = TokenChunk(
        b"", finish="abort", cached_tokens=cached, version=spec.requests.weights.version
    )
    return unfinished(spec, prompt, [*chunks, end], params, top_logprobs, began)


def without_tokens(
    spec: SessionSpec, prompt: bytes, params: SamplingParams, top_logprobs: int, began: float
) -> Completion:
    """Return a completion without output tokens. Its ``finish_reason`` is "length"."""
    end = TokenChunk(b"", finish="length", version=spec.requests.weights.version)
    return unfinished(spec, prompt, [end], params, top_logprobs, began)
