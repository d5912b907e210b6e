"""The seeds of engine processes that share one ``random_seed``."""

from __future__ import annotations

from typing import Final

SEEDS: Final = 1 << 32
"""numpy's generator takes seeds in ``[0, 2**32)``."""
_WORKER: Final = 15_485_863
_PROCESS: Final = 1_000_003
"""Primes. Their sums differ for all workers and processes below 256, and are less than 2**32."""


def process_seed(random_seed: int, worker: int, process: int) -> int:
    """The seed of one process of a pool.

    Args:
        random_seed: of the pool, in ``[0, 2**32)``.
        worker: its index in the pool. All ranks of a worker share one seed.
        process: how many processes of this worker came before it.

    Returns:
        ``random_seed`` itself for the first process of worker 0. Other processes have other seeds,
        because engines with one seed sample the same tokens.
    """
    return (random_seed + worker * _WORKER + process * _PROCESS) % SEEDS
