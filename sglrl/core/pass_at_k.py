"""Estimate pass@k: the probability that at least one of k samples passes."""

from __future__ import annotations

from math import comb

from ..errors import UsageError


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Return the unbiased estimate of pass@k for one item.

    It is the share of all choices of ``k`` among the samples that contain a passed sample:
    1 - C(n - c, k) / C(n, k), equation 1 of Chen et al. 2021 (https://arxiv.org/abs/2107.03374).

    Args:
        samples: number of samples of the item, n.
        passed: how many of the samples passed, c.
        k: number of samples to choose, 1..n.

    Raises:
        UsageError: a number is out of range.
    """
    if not 0 <= passed <= samples:
        raise UsageError(f"passed must be in 0..{samples}, got {passed}")
    if not 1 <= k <= samples:
        raise UsageError(f"k must be in 1..{samples}, the number of samples, got {k}")
    # The integers are exact, and Python rounds their quotient correctly.
    return 1.0 - comb(samples - passed, k) / comb(samples, k)
