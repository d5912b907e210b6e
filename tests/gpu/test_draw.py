"""Tokens drawn on a GPU follow the distribution, and their logprobs equal those of torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from engine.test_sampling import chi_square

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    # SGLang's imports raise these warnings.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning"),
]

KEY, STEP = (1 << 61) + 77, 1 << 61
VOCABULARY = 151_936


@pytest.fixture(scope="module")
def draw() -> Any:
    from sglrl_workers.engine.sglang.accelerations.gpu_sampling import draw

    return draw


def rows_of(row: torch.Tensor, draw: Any, temperature: float, batches: int) -> torch.Tensor:
    """Draw tokens for ``batches`` batches of 1,024 equal rows."""
    logits = row.cuda().expand(1024, -1).contiguous()
    temperatures = torch.full((1024, 1), temperature, device="cuda")
    return torch.cat([draw(logits, temperatures, KEY, STEP + 4 * i)[0] for i in range(batches)])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("scale", [0.0, 2.0])
def test_the_distribution(draw: Any, temperature: float, scale: float) -> None:
    """Compare groups of equal probability: most single tokens are too unlikely to be counted."""
    random = torch.Generator().manual_seed(3)
    row = torch.randn(VOCABULARY, generator=random) * scale
    ids = rows_of(row, draw, temperature, 200).cpu().numpy()
    probs = torch.softmax(row.double() / temperature, -1).numpy()
    # Group the tokens by probability, then by position.
    for order in (np.argsort(probs, kind="stable"), np.arange(VOCABULARY)):
        group = np.empty(VOCABULARY, np.int64)
        group[order] = np.minimum((np.cumsum(probs[order]) * 64).astype(np.int64), 63)
        expected = np.bincount(group, weights=probs, minlength=64) * len(ids)
        assert chi_square(np.bincount(group[ids], minlength=64), expected) < 4


def test_rows_are_drawn_apart(draw: Any) -> None:
    ids = rows_of(torch.zeros(VOCABULARY), draw, 1.0, 4)
    # About 8 equal pairs are expected among 4,096 draws from this many equally likely tokens.
    assert len(set(ids.tolist())) > 4000
    # The same row draws different tokens in another step.
    assert not torch.equal(ids[:1024], ids[1024:2048])
    assert torch.equal(ids, rows_of(torch.zeros(VOCABULARY), draw, 1.0, 4))


def test_unlikely_tokens_are_unlikely(draw: Any) -> None:
    """All other tokens together have probability 1e-6. Rounding must not make them more likely."""
    row = torch.zeros(VOCABULARY)
    row[100_000] = np.log(VOCABULARY) + np.log(1e6)
    ids = rows_of(row, draw, 1.0, 1000)
    assert int((ids != 100_000).sum()) < 12


def test_what_is_not_allowed_is_never_drawn(draw: Any) -> None:
    row = torch.full((VOCABULARY,), float("-inf"))
    row[[0, 77_777, VOCABULARY - 1]] = torch.tensor([-20.0, -20.0, -20.0])
    ids = rows_of(row, draw, 1.0, 100).cpu().numpy()
    counts = np.bincount(ids, minlength=VOCABULARY)[[0, 77_777, VOCABULARY - 1]]
    assert counts.sum() == len(ids)
    assert chi_square(counts, np.full(3, len(ids) / 3)) < 4


@pytest.mark.parametrize("columns", [1, 511, 4096, VOCABULARY])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs(draw: Any, columns: int, dtype: torch.dtype) -> None:
    logits = (torch.randn(300, columns + 7, device="cuda") * 5).to(dtype)[:, :columns]
    temperatures = torch.rand(300, 1, device="cuda") * 2 + 0.1
    before = logits.clone()
    ids, logprobs, undrawable = draw(logits, temperatures, KEY, STEP)
    assert torch.equal(logits, before)
    assert (ids.dtype, logprobs.dtype, undrawable.dtype) == (
        torch.int32,
        torch.float32,
        torch.bool,
    )
    expected = torch.log_softmax(logits.double() / temperatures, -1)
    expected = expected.gather(1, ids.long()[:, None])[:, 0]
    assert float((logprobs - expected).abs().max()) < 1e-4
    assert not undrawable.any()


def test_rows_of_which_nothing_can_be_drawn(draw: Any) -> None:
    logits = torch.randn(6, VOCABULARY, device="cuda")
    logits[0, 5] = float("nan")
    logits[1, VOCABULARY - 1] = float("inf")
    logits[2] = float("-inf")
    logits[3] = float("nan")
    logits[4, 9] = float("-inf")
    ids, logprobs, undrawable = draw(logits, torch.ones(6, device="cuda"), KEY, STEP)
    assert undrawable.tolist() == [True, True, True, True, False, False]
    assert ids[:4].tolist() == [0] * 4
    assert torch.isfinite(logprobs).all()
