"""Decide on which host, and on which of its GPUs, each worker runs.

The ranks of one worker stay on one host. Workers are spread over the hosts.
"""

from __future__ import annotations

import msgspec


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """What a host offers to workers.

    Attributes:
        gpus: its GPUs, as entries for ``CUDA_VISIBLE_DEVICES``.
        cores: number of CPU cores, at least 1.
    """

    gpus: tuple[str, ...]
    cores: int


class WorkerPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Where one worker runs. ``gpus``: those of the host; empty for a worker on CPU."""

    host: str
    gpus: tuple[str, ...]


class Placement:
    """The hosts and the places of the workers.

    Attributes:
        offers: what each host offers, by name, in the order of their arrival.
    """

    def __init__(self) -> None:
        self.offers: dict[str, Offer] = {}
        self._places: list[WorkerPlace] = []

    def add(self, host: str, offer: Offer) -> None:
        """Use a host from now on."""
        self.offers[host] = offer

    def remove(self, host: str) -> None:
        """Forget a host and all places on it."""
        del self.offers[host]
        self._places = [place for place in self._places if place.host != host]

    def take(self, workers: int, gpus: int) -> list[WorkerPlace] | None:
        """Take places for workers. Take none and return None if there are too few.

        Args:
            gpus: GPUs of each worker. With 0, workers run on CPUs, which take any number of them.
        """
        if not self.offers:
            return None
        before = list(self._places)
        for _ in range(workers):
            place = self._best(gpus)
            if place is None:
                self._places = before
                return None
            self._places.append(place)
        return self._places[len(before) :]

    def release(self, place: WorkerPlace) -> None:
        """Give a place back, unless its host was removed.

        The host may have returned, and another worker may have an equal place on it.
        """
        self._places = [other for other in self._places if other is not place]

    def holds(self, place: WorkerPlace) -> bool:
        """Return whether a place was taken, not given back, and its host was not removed since."""
        return any(other is place for other in self._places)

    def free(self, host: str) -> tuple[str, ...]:
        """Return the GPUs of a host that no worker uses."""
        used = {gpu for place in self._places if place.host == host for gpu in place.gpus}
        return tuple(gpu for gpu in self.offers[host].gpus if gpu not in used)

    def _best(self, gpus: int) -> WorkerPlace | None:
        """Return a place on the host that is used least, and the first such host of several."""
        if gpus:
            host = max(self.offers, key=lambda name: len(self.free(name)))
            free = self.free(host)
            return WorkerPlace(host=host, gpus=free[:gpus]) if len(free) >= gpus else None
        return WorkerPlace(host=min(self.offers, key=self._load), gpus=())

    def _load(self, host: str) -> float:
        """Return the workers of a host for each of its cores."""
        workers = sum(place.host == host for place in self._places)
        return workers / self.offers[host].cores
