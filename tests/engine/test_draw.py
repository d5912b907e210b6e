"""The kernels that draw tokens on a GPU, run by Triton's interpreter, compared with numpy.

tests/gpu/test_draw.py checks that the drawn tokens follow the distribution.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from .draw_cases import CASES, KEY, LANES, STEP


@pytest.fixture(scope="module")
def said() -> dict[str, dict[str, Any]]:
    # In a new interpreter: in a fork, Triton has already defined the functions that kernels use.
    program = subprocess.run(
        [sys.executable, "-m", f"{__package__}.draw_program"],
        cwd=Path(__file__).parent.parent,
        stdout=subprocess.PIPE,
        text=True,
        timeout=300,
        check=True,
    )
    found: dict[str, dict[str, Any]] = json.loads(program.stdout.splitlines()[-1])
    return found


def philox(counter: np.ndarray, key: int) -> np.ndarray:
    """Philox4x32-10 (https://doi.org/10.1145/2063384.2063405): uint32 [n, 4] of uint32 [n, 4]."""
    words = [counter[:, i].astype(np.uint64) for i in range(4)]
    keys = [key & 0xFFFFFFFF, key >> 32]
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    for _ in range(10):
        first, second = words[0] * np.uint64(0xD2511F53), words[2] * np.uint64(0xCD9E8D57)
        words = [
            (second >> half) ^ words[1] ^ np.uint64(keys[0]),
            second & low,
            (first >> half) ^ words[3] ^ np.uint64(keys[1]),
            first & low,
        ]
        keys = [(keys[0] + 0x9E3779B9) & 0xFFFFFFFF, (keys[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return np.stack(words, axis=1).astype(np.uint32)


def test_philox() -> None:
    """Compare with the known answer of the authors' library (Random123, kat_vectors)."""
    ones = philox(np.full((1, 4), 0xFFFFFFFF, np.uint32), 0xFFFFFFFF_FFFFFFFF)
    assert ones.tolist() == [[0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]]


def waits(row: int, columns: int) -> np.ndarray:
    """Return exponential variates, float64 [columns]: one per token. Four lanes share a counter."""
    parts = -(-columns // (4 * LANES))
    counters = np.zeros((parts * LANES, 4), np.uint32)
    counters[:, 0] = np.arange(parts * LANES)
    counters[:, 1:] = row, STEP & 0xFFFFFFFF, STEP >> 32
    numbers = philox(counters, KEY).reshape(parts, LANES, 4).transpose(0, 2, 1).reshape(-1)
    return -np.log1p(-(numbers[:columns].astype(np.float64) + 0.5) / 2**32)


@pytest.mark.parametrize("name", CASES)
def test_tokens_and_logprobs(name: str, said: dict[str, dict[str, Any]]) -> None:
    logits, temperatures = CASES[name]
    ids, logprobs, undrawable = said["drawn"][name]
    for i, (row, temperature) in enumerate(zip(logits, temperatures, strict=True)):
        if not np.isfinite(row.max()):
            assert (ids[i], logprobs[i], undrawable[i]) == (0, 0.0, True)
            continue
        scaled = row.astype(np.float64) / temperature
        assert ids[i] == np.argmax(scaled - np.log(waits(i, len(row))))
        expected = scaled[ids[i]] - scaled.max() - np.log(np.exp(scaled - scaled.max()).sum())
        largest = float(np.abs(scaled[np.isfinite(scaled)]).max())
        assert abs(logprobs[i] - expected) < 2e-6 + largest * 2.0**-22
        assert undrawable[i] is False


def test_which_steps_a_worker_with_a_gpu_draws_like_this(said: dict[str, dict[str, Any]]) -> None:
    """The kernels draw only in these steps.

    This holds for the installed SGLang. A version whose source differs uses its own sampler for all
    steps.
    """
    sampled = said["sampled"]
    ids, logprobs, undrawable, kept = sampled["logprobs"]
    assert kept
    assert not any(undrawable)
    expected = CASES["normal 150"][0].astype(np.float64) / np.float64(np.float32(0.7))
    expected -= np.log(np.exp(expected).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(logprobs, expected[np.arange(5), ids], atol=2e-6, rtol=0)
    assert sampled["tokens alone"] == [ids, None, [False] * 5, True]
    assert sampled["seeds no more"] == sampled["logprobs"]
    others = [ids[0], 0, *ids[2:]]
    assert sampled["one without"][0] == others
    assert sampled["one without"][2] == [False, True, False, False, False]
    for name in (
        "too early",
        "no kernels",
        "top-k",
        "likeliest tokens",
        "given tokens",
        "reports",
        "seeds",
    ):
        assert not sampled[name][3], name
    assert sampled["greedy"][0] == CASES["normal 150"][0].argmax(axis=1).tolist()
