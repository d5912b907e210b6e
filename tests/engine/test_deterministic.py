"""The tokens that a deterministic engine draws. ``tests/gpu`` compares bits."""

from __future__ import annotations

import numpy as np
import pytest

from .programs import run_program


@pytest.mark.parametrize("target", ["none", "fsdp"])
def test_seeds(target: str) -> None:
    """Seeds repeat, and requests without a seed do not share one, as they do in SGLang."""
    found = run_program("engine.deterministic_program", target)
    first, second = found["all"]
    assert first[:200] == second[:200]
    assert first[200:] != second[200:]
    # The temperature is 0.7, and 50 tokens have normally distributed logits.
    for drawn in (first[:200], first[200:]):
        assert len(set(drawn)) > 15
    limited = found["limited"]
    assert 3 < len({*limited}) < len({*first})
    # Of the limited distribution: four tokens or more have 80 %, and the likeliest has half of it.
    processed = np.exp(found["processed"])
    assert 0.4 < processed.max() < 0.7
    # The rounding of one row must not depend on the others.
    assert found["blocks"] == [1]
