"""Compute the model's whole distribution at every position of scored samples."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import torch

from ...launching.blocking import BlockingClient
from .rows import Sample


def with_logits(client: BlockingClient, samples: Sequence[Sample]) -> list[Sample]:
    """Add logits to scored samples, with one query per token.

    The scored tokens are in the prefix cache, so each query computes a single position.
    """
    prefixes = [s.ids[:i].numpy() for s in samples for i in range(1, len(s.ids))]
    found = iter(client.wait(_distributions(client.source, prefixes)))
    full = []
    for sample in samples:
        logits = torch.zeros(len(sample.ids), client.info.vocab_size)
        for row in logits[1:]:
            row.copy_(torch.from_numpy(next(found).copy()))
        full.append(sample._replace(logits=logits))
    return full


async def _distributions(client: Any, prefixes: Sequence[Any]) -> list[Any]:
    """Return float32 [vocabulary] for each prefix: the log-probs of the next token."""
    some = asyncio.Semaphore(256)

    async def one(ids: Any) -> Any:
        async with some:
            return (await client.next_token_logprobs(ids)).logprobs

    tasks = [asyncio.ensure_future(one(ids)) for ids in prefixes]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
