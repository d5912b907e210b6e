"""Seeded sampling: a request with a seed draws the same tokens, in any batch.

SGLang supports seeds only in its deterministic mode. This mode gives all requests without a seed
the same seed, and makes all requests slower. In 0.5.17, the noise of this mode is infinite for the
largest of the 2**32 hash values. In about one of 28,000 draws from 150,000 tokens, this noise makes
SGLang draw an arbitrary token, even a token of probability 0.

With this patch, a draw of a seeded request is a function of (seed, position, token) and the
probabilities. Requests without a seed are drawn as usual. While no seeded request is alive, there
is no extra computation.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from sglang.srt.layers.sampler import Sampler
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

from ..patch import Setup

NO_SEED = -1
_ELEMENTS = 1 << 24
"""Maximum number of elements in a block of rows. This limits the memory of the noise."""

_one_by_one = False
"""Whether to compute sums for one row at a time. On a GPU, more rows change the rounding."""

_alive: weakref.WeakSet[Any] = weakref.WeakSet()
"""SGLang's requests that have a seed. Every tensor-parallel rank has a copy of each request."""


def install(setup: Setup) -> None:
    """Patch SGLang's sampler."""
    global _one_by_one
    _one_by_one = setup.deterministic
    SamplingBatchInfo.from_schedule_batch = classmethod(_with_seeds)
    Sampler._sample_from_probs = _sample
    Sampler._sample_from_logprobs = _sample_from_logprobs


def any_alive() -> bool:
    """Return whether a request with a seed is alive."""
    return bool(_alive)


_from_schedule_batch = SamplingBatchInfo.from_schedule_batch.__func__
_sample_from_probs = Sampler._sample_from_probs


def _with_seeds(cls: Any, batch: Any, vocab_size: int) -> Any:
    """Create SGLang's sampling info with a tensor of seeds.

    Batches without seeds have the tensor, too, because SGLang can merge two batches only if both
    have it.
    """
    info = _from_schedule_batch(cls, batch, vocab_size)
    seeds = []
    for request in batch.reqs:
        seed = request.sampling_params.sampling_seed
        if seed is not None:
            _alive.add(request)
        seeds.append(NO_SEED if seed is None else seed)
    info.sampling_seed = torch.tensor(seeds, dtype=torch.int64).to(batch.device, non_blocking=True)
    return info


def _sample(
    self: Any, probs: torch.Tensor, info: Any, positions: torch.Tensor, simple: bool
) -> Any:
    # SGLang's own samplers must not see the seeds, and the batch must keep them.
    seeds, info.sampling_seed = info.sampling_seed, None
    try:
        drawn = _sample_from_probs(self, probs, info, positions, simple)
    finally:
        info.sampling_seed = seeds
    if seeds is None or not _alive:
        return drawn
    ids = drawn[0] if isinstance(drawn, tuple) else drawn
    limits = None if simple else (info.top_ks, info.top_ps, info.min_ps)
    ours = draw(probs, seeds, positions, limits)
    ids.copy_(torch.where(seeds >= 0, ours.to(ids.dtype), ids))
    return drawn


def _sample_from_logprobs(
    self: Any, logprobs: torch.Tensor, info: Any, positions: torch.Tensor
) -> torch.Tensor:
    """Sample with ``rl_on_policy_target``, for which SGLang has its own function."""
    drawn = self._sample_from_probs(logprobs.float().exp(), info, positions, True)
    ids: torch.Tensor = drawn[0] if isinstance(drawn, tuple) else drawn
    return ids


def draw(
    probs: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    limits: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Draw one token per row, int64 [n], distributed as ``probs`` over uniformly chosen seeds.

    Args:
        probs: float [n, vocabulary], each row sums to 1.
        seeds, positions: int64 [n].
        limits: top-k, top-p and min-p, [n] each, as SGLang's own sampler applies them. None if
            all tokens can be drawn.
    """
    blocks = []
    for block in row_blocks(len(probs), probs.shape[1], limits is not None):
        if limits is None:
            weights = probs[block].double()
        else:
            top_ks, top_ps, min_ps = limits
            weights = limited(probs[block], top_ks[block], top_ps[block], min_ps[block])
        # This is an exponential race: each token waits with rate p, and the shortest wait wins.
        waits = -torch.log(_uniform(seeds[block], positions[block], probs.shape[1]))
        blocks.append(torch.argmax(weights / waits, dim=-1))
    return torch.cat(blocks)


def row_blocks(rows: int, columns: int, sums: bool) -> Iterator[slice]:
    """Yield blocks of rows that are small enough for float64.

    Args:
        sums: whether the results depend on the rounding of each row's sum.
    """
    size = 1 if sums and _one_by_one else max(1, _ELEMENTS // columns)
    for at in range(0, rows, size):
        yield slice(at, min(at + size, rows))


def limited(
    probs: torch.Tensor, top_ks: torch.Tensor, top_ps: torch.Tensor, min_ps: torch.Tensor
) -> torch.Tensor:
    """Return ``probs`` as float64, with zeros for the tokens that must not be drawn.

    All limits refer to the given probabilities, as in SGLang: top-p does not use the probabilities
    that remain after top-k.
    """
    ordered, tokens = probs.sort(dim=-1, descending=True, stable=True)
    ordered = ordered.double()
    rank = torch.arange(probs.shape[1], device=probs.device)
    out = rank >= top_ks.view(-1, 1)
    out |= ordered.cumsum(dim=-1) - ordered > top_ps.view(-1, 1)
    out |= ordered < ordered[:, :1] * min_ps.view(-1, 1)
    return torch.zeros_like(ordered).scatter_(-1, tokens, ordered.masked_fill(out, 0.0))


def _signed(constant: int) -> int:
    """Return 64 bits as the signed integer that torch requires."""
    return constant - (1 << 64) if constant >> 63 else constant


_STEP = _signed(0x9E3779B97F4A7C15)
_FIRST = _signed(0xBF58476D1CE4E5B9)
_SECOND = _signed(0x94D049BB133111EB)


def _mix(bits: torch.Tensor) -> torch.Tensor:
    """Apply the finalizer of SplitMix64 (https://doi.org/10.1145/2660193.2660195) to int64."""
    bits = (bits ^ _shift(bits, 30)) * _FIRST
    bits = (bits ^ _shift(bits, 27)) * _SECOND
    return bits ^ _shift(bits, 31)


def _shift(bits: torch.Tensor, by: int) -> torch.Tensor:
    """Shift ``bits`` to the right and fill with zeros."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def _uniform(seeds: torch.Tensor, positions: torch.Tensor, columns: int) -> torch.Tensor:
    """Return float64 [n, columns] in (0, 1), a function of seed, position and column only."""
    keys = _mix(_mix(seeds * _STEP + _STEP) + (positions.to(torch.int64) + 1) * _STEP)
    column = torch.arange(columns, device=seeds.device, dtype=torch.int64) * _STEP
    bits = _shift(_mix(keys.view(-1, 1) + column), 11)
    return (bits.double() + 0.5) * 2.0**-53
