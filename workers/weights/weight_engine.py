"""The interface that an engine implements so that the weight channel can update its weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch

from sglrl.errors import WeightUpdateError
from sglrl.wire.weights import ModelDescription, Shard

from .staging import Staged


class LiveWeights(Protocol):
    """The tensors of a rank's model: read them, and write or replace their values."""

    device: torch.device

    def describe(self) -> ModelDescription:
        """Return the names, shapes and dtypes of the weights.

        The link's thread calls this. It may take seconds.
        """
        ...

    def checksums(self, names: Sequence[str]) -> list[Shard]:
        """Return the checksums of the shards of these weights on this rank."""
        ...

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return all tensors of the weights as the engine stores them, each storage only once."""
        ...

    def reading(self) -> AbstractContextManager[Any]:
        """Return a context in which a thread other than the engine's may read ``tensors``.

        Several threads may read at the same time.
        """
        ...

    def spare(self, names: Sequence[str]) -> Staged | None:
        """Return spare memory for these tensors. This memory can become live without a copy.

        The caller fills the memory, then calls ``WeightEngine.staged`` with None. The engine keeps
        the memory until it becomes live. Weights that ``names`` does not contain already have
        their live values in this memory.

        Returns:
            The tensors by name. None if the engine has no memory for these tensors.
        """
        ...

    def settle(self) -> None:
        """Prepare for the next call of ``spare``. Call this when nothing waits for the engine."""
        ...

    def targets(self, names: Sequence[str]) -> list[torch.Tensor] | None:
        """Return the live tensors that can receive the values of these weights without a copy.

        Return None unless all of them are contiguous and have the sizes of the named weights.
        """
        ...

    def bind(self, staged: Staged) -> Any:
        """Find the live target of every part of these tensors, for ``copy`` and ``staged``."""
        ...

    def copy(self, bound: Any) -> None:
        """Copy the bound tensors into the live weights now. The engine must be held."""
        ...


class WeightEngine(Protocol):
    """The scheduling side of an engine: updates become live between two of its steps.

    The threads of the channel call ``commit`` and ``hold``. The scheduler's thread performs them
    later, on all ranks between the same two steps.
    """

    @property
    def live(self) -> LiveWeights: ...

    def staged(self, update: int, bound: Any) -> None:
        """Accept the tensors of this update, all of which have arrived.

        The engine keeps them until ``commit`` or ``release`` of this update, or until ``forget``.

        Args:
            bound: the result of ``LiveWeights.bind``. None if the tensors are in ``spare``.
        """
        ...

    def nearly_staged(self, seconds: float, exchanged: bool) -> None:
        """Announce one or two steps ahead that all tensors will have arrived in ``seconds``.

        Args:
            exchanged: whether the tensors arrive in ``LiveWeights.spare``.
        """
        ...

    def step_seconds(self) -> float:
        """Return the current duration of a step, in seconds."""
        ...

    def forget(self) -> None:
        """Drop the staged update, and cancel the announcement of ``nearly_staged``."""
        ...

    def commit(self, update: int, version: int, inflight: str) -> None:
        """Make the staged update live between two steps, then call ``RankWeights.committed``.

        If a replica has several ranks, the call on the first rank acts on all of them.
        """
        ...

    def hold(self, update: int, inflight: str) -> None:
        """Stop the engine between two steps until ``release``."""
        ...

    def held(self, update: int, timeout: float) -> bool:
        """Wait until the engine is held for this update.

        Returns:
            False after ``timeout`` seconds, or at once if this hold was already released.
        """
        ...

    def release(self, update: int, version: int | None, *, staged: bool = False) -> float:
        """End the hold of this update, and cancel pending holds of this and earlier updates.

        Args:
            version: the new version of the weights. None keeps the version.
            staged: whether to make the tensors ``staged`` for this update live first, and then call
                ``RankWeights.committed``. Tensors of another update stay staged.

        Returns:
            The number of milliseconds for which the engine was held.
        """
        ...


@contextmanager
def overwriting(engine: WeightEngine, id_: int, version: int, timeout: float) -> Iterator[None]:
    """Hold the engine while the block overwrites all live weights with the weights of ``version``.

    If the block raises, the live weights have no defined version, and the driver kills the worker.

    Args:
        id_: the id of the message that requests the copy.
        timeout: maximum seconds until the engine stops.

    Raises:
        WeightUpdateError: the engine did not stop in time.
    """
    engine.hold(id_, "continue")
    done = None
    try:
        if not engine.held(id_, timeout):
            raise WeightUpdateError("the engine did not stop in time")
        yield
        done = version
    finally:
        engine.release(id_, done)
