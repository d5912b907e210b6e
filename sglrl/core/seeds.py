"""The seeds of engine processes that share one ``random_seed``."""

from __future__ import annotations

from typing import Final

SEEDS: Final = 1 << 32
"""The generator of numpy accepts seeds in ``[0, 2**32)``."""
_WORKER: Final = 15_485_863
_PROCESS: Final = 1_000_003
"""``_WORKER`` and ``_PROCESS`` are primes. For all workers and processes below 256 the sums of
their multiples differ and are less than 2**32."""


def process_seed(random_seed: int, worker: int, process: int) -> int:
    """Return the seed of one process of a pool.

    Args:
        random_seed: the seed of the pool, in ``[0, 2**32)``.
        worker: the index of the worker in the pool. All ranks of a worker share one seed.
        process: the number of earlier processes of this worker.

    Returns:
        ``random_seed`` itself for the first process of worker 0. Other processes have other seeds,
        because engines with the same seed sample the same tokens.
    """
    return (random_seed + worker * _WORKER + process * _PROCESS) % SEEDS
