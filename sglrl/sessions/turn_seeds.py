"""The seeds of the turns of one session."""

from __future__ import annotations

from ..core.seeds import MAX_SEED, derived_seed
from ..inference.number_checks import check_integer


class TurnSeeds:
    """Derives a seed for each turn, so that sessions with the same seed sample different texts.

    Args:
        path: which of the sessions with the same seed this is.
    """

    def __init__(self, path: tuple[int | str, ...]) -> None:
        self.path = path
        self._turns = 0
        """Number of turns that were sampled with the seeds of this path."""
        self._forks = 0

    def of_turn(self, seed: int) -> int:
        """Return the seed of the next turn for a seed that the user has given.

        Raises:
            InvalidRequest: the given seed is not an integer in ``0..MAX_SEED``.
        """
        check_integer("seed", seed, 0, MAX_SEED)
        return derived_seed(seed, *self.path, self._turns)

    def turn_ended(self) -> None:
        """Use another seed for the next turn, also if it continues from an earlier place."""
        self._turns += 1

    def select(self, *path: int | str) -> None:
        """Use the seeds of this path for the turns from now on."""
        self.path, self._turns = path, 0

    def fork(self) -> tuple[int | str, ...]:
        """Return the path of another fork."""
        self._forks += 1
        return (*self.path, self._forks)
