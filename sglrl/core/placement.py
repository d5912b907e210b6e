"""Decide on which host, and on which of its GPUs, each worker runs.

The ranks of one worker stay on one host. Workers are spread over the hosts.
"""

from __future__ import annotations

import msgspec


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """The resources that a host offers to workers.

    Attributes:
        gpus: the GPUs of the host, as entries for ``CUDA_VISIBLE_DEVICES``.
        cores: number of CPU cores, at least 1.
    """

    gpus: tuple[str, ...]
    cores: int


class WorkerPlace(msgspec.Struct, frozen=True, kw_only=True):
    """The host of one worker, and the worker's GPUs on this host. On CPU, ``gpus`` is empty."""

    host: str
    gpus: tuple[str, ...]


class Placement:
    """The hosts and the places of the workers.

    Attributes:
        offers: the offer of each host, by the host's name, in the order in which hosts were added.
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
            workers: number of workers.
            gpus: number of GPUs of each worker. With 0, the workers run on CPU, and a host takes
                any number of them.
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
        """Release a place. Do nothing if its host was removed.

        The place is found by identity, because the host may have been added again and another
        worker may have an equal place on it.
        """
        self._places = [other for other in self._places if other is not place]

    def holds(self, place: WorkerPlace) -> bool:
        """Return True until a taken place is released or its host is removed."""
        return any(other is place for other in self._places)

    def free(self, host: str) -> tuple[str, ...]:
        """Return the GPUs of a host that no worker uses."""
        used = {gpu for place in self._places if place.host == host for gpu in place.gpus}
        return tuple(gpu for gpu in self.offers[host].gpus if gpu not in used)

    def _best(self, gpus: int) -> WorkerPlace | None:
        """Return a place on the least used host, or None if no host has enough free GPUs.

        Of equally used hosts, take the first.
        """
        if gpus:
            host = max(self.offers, key=lambda name: len(self.free(name)))
            free = self.free(host)
            return WorkerPlace(host=host, gpus=free[:gpus]) if len(free) >= gpus else None
        return WorkerPlace(host=min(self.offers, key=self._load), gpus=())

    def _load(self, host: str) -> float:
        """Return the number of workers of a host, divided by its number of cores."""
        workers = sum(place.host == host for place in self._places)
        return workers / self.offers[host].cores
