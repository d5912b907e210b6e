"""The estimator of pass@k equals the share of all choices that contain a passed sample."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations
from math import comb

import pytest

from sglrl.errors import UsageError
from sglrl.rollouts.evaluation import pass_at_k


@pytest.mark.parametrize("samples", range(1, 9))
def test_it_is_the_share_of_choices_with_a_passed_sample(samples: int) -> None:
    for passed in range(samples + 1):
        results = [True] * passed + [False] * (samples - passed)
        for k in range(1, samples + 1):
            choices = [any(choice) for choice in combinations(results, k)]
            assert pass_at_k(samples, passed, k) == pytest.approx(sum(choices) / len(choices))


def test_many_samples_neither_overflow_nor_lose_digits() -> None:
    exact = 1 - Fraction(comb(9_990, 500), comb(10_000, 500))
    assert pass_at_k(10_000, 10, 500) == pytest.approx(float(exact), rel=1e-12)
    assert pass_at_k(10_000, 0, 10_000) == 0
    assert pass_at_k(10_000, 1, 10_000) == 1


@pytest.mark.parametrize(
    ("samples", "passed", "k", "words"),
    [
        (4, 5, 1, "passed must be in 0..4, got 5"),
        (4, -1, 1, "passed must be in 0..4, got -1"),
        (4, 1, 0, "k must be in 1..4, the number of samples, got 0"),
        (4, 1, 5, "k must be in 1..4, the number of samples, got 5"),
    ],
)
def test_numbers_out_of_range_are_named(samples: int, passed: int, k: int, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        pass_at_k(samples, passed, k)
    assert str(caught.value) == words
