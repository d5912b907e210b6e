"""Iterate over the trajectories in a list of trajectories, of groups, or of both."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

One = TypeVar("One")
One_co = TypeVar("One_co", covariant=True)


class WholeGroup(Protocol[One_co]):
    """The part of ``rollouts.Group`` used here. ``rollouts`` is higher, so do not import it."""

    @property
    def trajectories(self) -> Sequence[One_co]: ...


Given = Iterable[One | WholeGroup[One]] | WholeGroup[One]
"""Trajectories, or groups of them, or one group."""


def each_trajectory(given: Given[One]) -> Iterator[One]:
    """Yield the given trajectories and the trajectories of the given groups, in order."""
    whole: Any = [given] if _is_group(given) else given
    for one in whole:
        if _is_group(one):
            yield from one.trajectories
        else:
            yield one


def _is_group(given: Any) -> bool:
    # ``Session.trajectories`` is a method, so test for a tuple.
    return isinstance(getattr(given, "trajectories", None), tuple)
