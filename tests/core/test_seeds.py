"""Each request, and each process of a pool, has its own seed."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglrl.core.seeds import MAX_SEED, SEEDS, derived_seed, process_seed


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


PARTS = st.integers(0, 1 << 40) | st.text(max_size=8)
PATHS = st.lists(PARTS, max_size=6).map(tuple)


@given(st.integers(0, MAX_SEED), st.lists(PATHS, unique=True, max_size=50))
def test_requests_with_one_seed_have_different_seeds(seed: int, paths: list[Any]) -> None:
    seeds = [derived_seed(seed, *path) for path in paths]
    assert all(0 <= one <= MAX_SEED for one in seeds)
    first = [path for path in paths if not any(path)]
    assert all(derived_seed(seed, *path) == seed for path in first)
    assert len(set(seeds)) == len(paths) - max(0, len(first) - 1)


def test_consecutive_seeds_share_no_derived_seed() -> None:
    seeds = [derived_seed(seed, i) for seed in range(100) for i in range(1, 100)]
    assert len(set(seeds)) == 100 * 99
    assert not set(seeds) & {*range(1000)}


def test_derived_seeds_do_not_depend_on_the_process() -> None:
    """Agents in other processes, and later runs, derive the same numbers."""
    code = "from sglrl.core.seeds import derived_seed; print(derived_seed(7, 1, 'x', 2))"
    environment = {**os.environ, "PYTHONHASHSEED": "5"}
    made = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, check=True
    )
    assert int(made.stdout) == derived_seed(7, 1, "x", 2) == derived_seed(7, 1, "x", 2)
