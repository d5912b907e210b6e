"""Draw tokens and compute their logprobs on the GPU, in one pass over the logits.

Without top-p, top-k and min-p every token can be drawn. SGLang then divides the logits and computes
probabilities, noise, quotients and logarithms, in a dozen passes over [requests, vocabulary]. With
a small model and a large vocabulary, these passes take a third of a step.

This module reads each logit once. An exponential race selects the token: each token gets a random
number E with an exponential distribution, and the token with the smallest E / p wins. Each token
wins with its probability p. Comparing the logarithms of E / p needs no probabilities (the
Gumbel-max trick, https://arxiv.org/abs/1411.0030, section 2). The same pass sums the terms of the
logprob.

SGLang handles all other cases: other ways to sample, seeds (``seeded_sampling``), top logprobs, and
reports (``sampling_reports``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from sglang.srt.layers import sampler as theirs
from sglang.srt.layers.sampler import Sampler

from ..patch import Setup
from ..patches import seeded_sampling

logger = logging.getLogger("sglrl.worker")

_LANES = 512
"""Number of lanes in a program. Each handles four logits: one random draw yields four numbers."""
_KEY = 0x2545F4914F6CDD1D
"""Changes torch's seed, so that the random numbers differ from the numbers that torch draws."""
_LONG = 1 << 61

_begun = False


@triton.jit
def _race(logit, temperature, bits, allowed):  # type: ignore[no-untyped-def]
    """Return the scaled logits, and the logarithms of their scores in the race."""
    scaled = tl.where(allowed, logit.to(tl.float32) / temperature, float("-inf"))
    # The value is in (0, 1). It has the finest steps near 0, where the race is decided.
    uniform = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    small = uniform * (1.0 + uniform * (0.5 + uniform * (1.0 / 3.0 + uniform * 0.25)))
    waits = tl.where(uniform < 0.01, small, -tl.log(1.0 - uniform))
    return scaled, scaled - tl.log(waits)


@triton.jit
def _first(score, token, other, other_token):  # type: ignore[no-untyped-def]
    """Return the higher of two scores, and its token."""
    better = other > score
    return tl.where(better, other, score), tl.where(better, other_token, token)


@triton.jit(do_not_specialize=["key", "step"])  # type: ignore[untyped-decorator]
def _draw_part(  # type: ignore[no-untyped-def]
    logits, row_stride, columns, temperatures, key, step, floats, tokens, LANES: tl.constexpr
):
    """Compute for a part of a row: maximum, sum of exponentials, best score, its token and logit.

    The logit is scaled by the temperature.
    """
    row, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    lane = tl.arange(0, LANES)
    token = part * (4 * LANES) + lane
    temperature = tl.load(temperatures + row)
    at = logits + row.to(tl.int64) * row_stride
    none = tl.zeros([LANES], tl.int32)
    bits0, bits1, bits2, bits3 = tl.philox(
        key,
        none + part * LANES + lane,
        none + row,
        none + (step & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True),
        none + (step >> 32).to(tl.int32),
    )
    token1, token2, token3 = token + LANES, token + 2 * LANES, token + 3 * LANES
    low = float("-inf")
    scaled0, score0 = _race(
        tl.load(at + token, token < columns, low), temperature, bits0, token < columns
    )
    scaled1, score1 = _race(
        tl.load(at + token1, token1 < columns, low), temperature, bits1, token1 < columns
    )
    scaled2, score2 = _race(
        tl.load(at + token2, token2 < columns, low), temperature, bits2, token2 < columns
    )
    scaled3, score3 = _race(
        tl.load(at + token3, token3 < columns, low), temperature, bits3, token3 < columns
    )
    most = tl.max(tl.maximum(tl.maximum(scaled0, scaled1), tl.maximum(scaled2, scaled3)), axis=0)
    # A part without allowed tokens adds nothing. A NaN or infinite value makes the sum NaN.
    zero = tl.where(most == low, 0.0, most)
    total = tl.sum(
        tl.exp(scaled0 - zero)
        + tl.exp(scaled1 - zero)
        + tl.exp(scaled2 - zero)
        + tl.exp(scaled3 - zero),
        axis=0,
    )
    left, left_token = _first(score0, token, score1, token1)
    right, right_token = _first(score2, token2, score3, token3)
    score, token = _first(left, left_token, right, right_token)
    best = tl.max(score, axis=0)
    drawn = tl.min(tl.where(score == best, token, columns - 1), axis=0)
    to = row * parts + part
    of_one = tl.num_programs(0) * parts
    tl.store(floats + to, most)
    tl.store(floats + of_one + to, total)
    tl.store(floats + 2 * of_one + to, best)
    tl.store(floats + 3 * of_one + to, tl.load(at + drawn).to(tl.float32) / temperature)
    tl.store(tokens + to, drawn)


@triton.jit  # type: ignore[untyped-decorator]
def _join_parts(  # type: ignore[no-untyped-def]
    floats, tokens, parts, ids, logprobs, undrawable, PARTS: tl.constexpr
):
    row = tl.program_id(0)
    part = tl.arange(0, PARTS)
    inside = part < parts
    low = float("-inf")
    at = row * parts + part
    of_one = tl.num_programs(0) * parts
    most = tl.load(floats + at, inside, low)
    total = tl.load(floats + of_one + at, inside, 0.0)
    score = tl.load(floats + 2 * of_one + at, inside, low)
    highest = tl.max(most, axis=0)
    sums = tl.sum(tl.where(inside, total * tl.exp(most - highest), 0.0), axis=0)
    best = tl.max(score, axis=0)
    winner = tl.min(tl.where(inside & (score == best), part, parts - 1), axis=0)
    drawn = tl.load(tokens + row * parts + winner)
    scaled = tl.load(floats + 3 * of_one + row * parts + winner)
    logprob = scaled - highest - tl.log(sums)
    # As in a softmax, the row is bad if a value is NaN or infinite, or if no token is allowed.
    bad = (sums != sums) | (logprob != logprob) | (highest == low)
    tl.store(ids + row, tl.where(bad, 0, drawn))
    tl.store(logprobs + row, tl.where(bad, 0.0, logprob))
    tl.store(undrawable + row, bad.to(tl.uint8))


def draw(
    logits: torch.Tensor, temperatures: torch.Tensor, key: int, step: int, lanes: int = _LANES
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw one token per row, distributed as ``softmax(logits / temperatures)``.

    Args:
        logits: float [n, vocabulary]. -inf forbids a token. The logits do not change.
        temperatures: float32 [n] or [n, 1].
        key, step: the seed and the position of the random numbers. The result is a function of
            these two, the row's index and the row's values. Both are from 2**61 to 2**62, because
            Triton never compiles numbers of this size as 32 bits.
        lanes: the number of lanes of one program, a power of two.

    Returns:
        Token ids, int32 [n]; their logprobs, float32 [n]; and whether each row has no token, bool
        [n]. A row has no token if a value is NaN or +inf, or if all values are -inf. The id and the
        logprob of this row are 0.
    """
    rows, columns = logits.shape
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    parts = triton.cdiv(columns, 4 * lanes)
    device = logits.device
    floats = torch.empty((4, rows, parts), dtype=torch.float32, device=device)
    tokens = torch.empty((rows, parts), dtype=torch.int32, device=device)
    ids = torch.empty(rows, dtype=torch.int32, device=device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=device)
    undrawable = torch.empty(rows, dtype=torch.uint8, device=device)
    if rows:
        _draw_part[rows, parts](
            logits, logits.stride(0), columns, temperatures, key, step, floats, tokens, LANES=lanes
        )
        _join_parts[rows,](
            floats,
            tokens,
            parts,
            ids,
            logprobs,
            undrawable,
            PARTS=triton.next_power_of_2(parts),
        )
    return ids, logprobs, undrawable.view(torch.bool)


def install(setup: Setup) -> Callable[[Any], bool]:
    """Patch SGLang's sampler. Return a function that compiles the kernels and enables them."""
    if theirs.SGLANG_RETURN_ORIGINAL_LOGPROB:
        return lambda scheduler: False
    forward = Sampler.forward

    def draw_or_forward(
        self: Any,
        output: Any,
        info: Any,
        return_logprob: bool,
        top_logprobs: Any,
        token_ids: Any,
        positions: torch.Tensor,
        **kwargs: Any,
    ) -> torch.Tensor:
        if kwargs or not _takes(info, return_logprob, top_logprobs, token_ids):
            ids: torch.Tensor = forward(
                self, output, info, return_logprob, top_logprobs, token_ids, positions, **kwargs
            )
            return ids
        logits = self._preprocess_logits(output.next_token_logits, info)
        key, step = _next_step(logits.device)
        ids, logprobs, info.sglrl_undrawable = draw(logits, info.temperatures, key, step)
        if return_logprob:
            output.next_token_logprobs = logprobs
        self._sync_token_ids_across_tp(ids, info)
        return ids

    Sampler.forward = draw_or_forward
    return begin


def _takes(info: Any, return_logprob: bool, top_logprobs: Any, token_ids: Any) -> bool:
    return bool(
        _begun
        and not info.is_all_greedy
        and not info.need_top_p_sampling
        and not info.need_top_k_sampling
        and not info.need_min_p_sampling
        and not seeded_sampling.any_alive()
        and info.sglrl_reports is None
        and not any(getattr(info, "return_sampling_masks", None) or ())
        and getattr(info, "sampling_mask_batch_indices", None) is None
        and not (
            return_logprob
            and (any(top_logprobs or ()) or any(ids is not None for ids in token_ids or ()))
        )
    )


def _next_step(device: torch.device) -> tuple[int, int]:
    """Return ``key`` and ``step`` from torch's generator. All ranks get the same values."""
    generator = torch.cuda.default_generators[device.index]
    at: int = generator.get_offset()
    generator.set_offset(at + 4)
    return (generator.initial_seed() ^ _KEY) % _LONG + _LONG, at % _LONG + _LONG


def begin(scheduler: Any) -> bool:
    """Compile the kernels before the first request, and use them from now on.

    Either all ranks use the kernels, or none does.
    """
    global _begun
    try:
        logits = torch.zeros((2, scheduler.model_config.vocab_size), device=scheduler.device)
        temperatures = torch.ones((2, 1), device=logits.device)
        ids, _, _ = draw(logits, temperatures, *_next_step(logits.device))
        works = int(bool((ids < logits.shape[1]).all()))
    except Exception:
        logger.warning("Triton's kernels do not work here: SGLang draws", exc_info=True)
        works = 0
    if scheduler.server_args.tp_size > 1:
        agreed = torch.tensor(works)
        torch.distributed.all_reduce(
            agreed, torch.distributed.ReduceOp.MIN, group=scheduler.tp_cpu_group
        )
        works = int(agreed)
    _begun = bool(works)
    return _begun
