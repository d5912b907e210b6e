"""Each process of a pool has its own seed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglrl.core.seeds import SEEDS, process_seed


@pytest.mark.parametrize("seed", [0, 1, (1 << 31) - 1, 1 << 31, SEEDS - 1])
def test_no_two_processes_share_a_seed(seed: int) -> None:
    seeds = {process_seed(seed, worker, process) for worker in range(256) for process in range(256)}
    assert len(seeds) == 256 * 256
    assert min(seeds) >= 0
    assert max(seeds) < SEEDS
    assert process_seed(seed, 0, 0) == seed


@given(st.integers(0, SEEDS - 1), st.integers(0, 1 << 40), st.integers(0, 1 << 40))
def test_every_seed_is_one_that_numpy_takes(seed: int, worker: int, process: int) -> None:
    assert 0 <= process_seed(seed, worker, process) < SEEDS
