"""Derive the seeds of requests and of engine processes from the seed that a user gives."""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

MAX_SEED: Final = (1 << 62) - 1
"""The largest seed of a request."""

SEEDS: Final = 1 << 32
"""Number of possible seeds of a process. They are in ``[0, 2**32)``, as numpy requires."""
_WORKER: Final = 15_485_863
_PROCESS: Final = 1_000_003
"""``_WORKER`` and ``_PROCESS`` are primes. For all workers and processes below 256 the sums of
their multiples differ and are less than 2**32."""


def derived_seed(seed: int, *path: int | str) -> int:
    """Return the seed of one of several requests that a user has given the same seed.

    With the same seed, requests with equal prompts would sample equal tokens. The derived seed
    depends on the arguments alone, so it does not depend on the order in which requests end.

    Args:
        seed: the given seed.
        path: identifies the request by the numbers of its sample, attempt, turn and so on.

    Returns:
        A number in ``0..MAX_SEED``. If all parts of the path are 0, it is ``seed`` itself, so that
        the first of several requests samples the same tokens as a single request. Results for other
        paths are unrelated, even if the seeds are consecutive numbers.
    """
    if not any(path):
        return seed
    digest = blake2b(repr((int(seed), *path)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & MAX_SEED


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
