"""Logits and temperatures for the drawing kernels and for their reference."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

KEY, STEP, LANES = 0x2EDC_BA98_7654_3210, 0x2000_0003_F234_5678, 16


def _cases() -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Yield a name, float32 logits [n, vocabulary] and float32 temperatures [n, 1]."""
    random = np.random.default_rng(5)
    # The kernels work in parts of 4 * LANES columns: less than one part, one, more than two.
    for columns in (5, 64, 150):
        logits = random.normal(0, 3, (5, columns)).astype(np.float32)
        yield f"normal {columns}", logits, random.uniform(0.3, 2, (5, 1)).astype(np.float32)
    one = np.ones((4, 1), np.float32)
    yield "even", np.full((4, 150), 7, np.float32), one
    yield "far off", random.normal(-3e4, 1, (4, 150)).astype(np.float32), one
    only = np.full((4, 150), -np.inf, np.float32)
    only[[0, 1, 2, 3], [0, 63, 64, 149]] = [-1e4, 0, 1e4, 3]
    yield "only one is allowed", only, one
    bad = random.normal(0, 1, (4, 150)).astype(np.float32)
    bad[0, 3], bad[1, 149], bad[2] = np.nan, np.inf, -np.inf
    yield "nothing can be drawn but from the last", bad, one


CASES = {name: given for name, *given in _cases()}
