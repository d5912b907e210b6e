"""Rollouts for programs without asyncio: ``BlockingRollout`` is ``Rollout`` without ``await``."""

from __future__ import annotations

import os
from collections.abc import Coroutine, Iterator
from typing import Any, Protocol, Self, TypeVar

from ..core.rollout_metrics import RolloutMetrics
from ..errors import UsageError
from ..rollouts.group import Group
from ..rollouts.run import Rollout
from .client_thread import plain

_T = TypeVar("_T")


class _Client(Protocol):
    """The part of ``BlockingClient`` that a rollout uses."""

    loop: Any
    runs: set[Rollout]

    def wait(self, work: Coroutine[Any, Any, _T]) -> _T: ...


class BlockingRollout:
    """``Rollout`` without ``await``. Iterate over its groups or over its ``batches()``.

    ``BlockingClient.rollout`` makes it. A ``with`` block closes the rollout, also when the block
    exits early.
    """

    def __init__(self, client: _Client, run: Rollout) -> None:
        self._client = client
        self._run = run
        self._begun = False

    def __enter__(self) -> Self:
        self._begun = True
        self._client.wait(self._enter())
        return self

    async def _enter(self) -> None:
        await self._run.__aenter__()
        self._client.runs.add(self._run)

    async def _close(self) -> None:
        await self._run.close()
        self._client.runs.discard(self._run)

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the rollout. Closing the client also closes it. See ``Rollout.close``."""
        if self._client.loop is not None:
            self._client.wait(self._close())

    def __iter__(self) -> Iterator[Group]:
        if not self._begun:
            with self:
                yield from self
            return
        # ``aiter`` raises an error if the rollout cannot be iterated.
        aiter(self._run)
        while groups := self.take(1):
            yield from groups

    def batches(self) -> Iterator[list[Group]]:
        """Yield lists of ``batch_size`` groups. See ``Rollout.batches``."""
        size = self._run.batch_size
        if size is None:
            raise UsageError("batches() needs rollout(..., batch_size=)")
        while batch := self.take(size):
            yield batch

    def take(self, n: int = 1, *, timeout: float | None = None) -> list[Group]:
        """Return the next ``n`` groups. See ``Rollout.take``."""
        return self._client.wait(self._run.take(n, timeout=timeout))

    def pause(self, *, timeout: float | None = None) -> None:
        """Begin no further turn, and wait for the running turns. See ``Rollout.pause``."""
        self._client.wait(self._run.pause(timeout=timeout))

    def resume(self) -> None:
        """Continue after ``pause``. See ``Rollout.resume``."""
        self._client.wait(plain(self._run.resume))

    def state_dict(self) -> dict[str, Any]:
        """Return the finished items, for a later run. See ``Rollout.state_dict``."""
        return self._client.wait(plain(self._run.state_dict))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write ``state_dict()`` to a file, for a later run. See ``Rollout.save``."""
        self._client.wait(plain(lambda: self._run.save(path)))

    @property
    def metrics(self) -> RolloutMetrics:
        """A snapshot of the rollout's metrics. See ``Rollout.metrics``."""
        return self._client.wait(plain(lambda: self._run.metrics))
