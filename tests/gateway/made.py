"""Make completions without an engine, and clients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import openai

from sglrl.inference.completion import Completion
from sglrl.inference.sampling import SamplingParams
from sglrl.wire.engine import TokenChunk


def client_of(gateway: Any) -> openai.AsyncOpenAI:
    """Return a client of a gateway or of a session. It does not repeat requests."""
    url = getattr(gateway, "base_url", None) or gateway.url + "/v1"
    key = getattr(gateway, "api_key", "x")
    return openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0)


def letters(ids: Sequence[int], skip_special_tokens: bool) -> str:
    """Decode token 0 to "a", token 1 to "b", ..."""
    return "".join([chr(ord("a") + id_) for id_ in ids])


def chunk(ids: Sequence[int], top: int = 0, **fields: Any) -> TokenChunk:
    """Return a chunk whose token ``i`` has the logprob ``-i / 2``.

    Args:
        top: number of the likeliest tokens: 0, 1, ..., with the logprobs -0.25, -0.5, ...
    """
    found = np.array(ids, "<i4")
    return TokenChunk(
        ids=found.tobytes(),
        logprobs=(-found / 2).astype("<f4").tobytes(),
        top_ids=np.tile(np.arange(top, dtype="<i4"), len(ids)).tobytes(),
        top_logprobs=np.tile(-(np.arange(top, dtype="<f4") + 1) / 4, len(ids)).tobytes(),
        **fields,
    )


def completion(
    ids: Sequence[int],
    *,
    prompt: Sequence[int] = (7, 8),
    top: int = 0,
    finish: str = "length",
    chunks: Sequence[TokenChunk] | None = None,
    decode: Any = letters,
    cached: int = 0,
    stop_match: str | int | None = None,
    **sampling: Any,
) -> Completion:
    end = {"finish": finish, "cached_tokens": cached, "stop_match": stop_match}
    return Completion(
        worker=0,
        resumed=0,
        prompt=np.array(prompt, "<i4").tobytes(),
        chunks=tuple(chunks or [chunk(ids, top, **end)]),
        wants_logprobs=True,
        top_count=top,
        submitted_at=1.0,
        sent_at=1.5,
        first_at=2.0,
        finished_at=3.0,
        decode=decode,
        params=SamplingParams(**sampling),
    )
