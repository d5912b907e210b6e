"""The interface of an engine for weight updates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch

from sglrl.errors import WeightUpdateError
from sglrl.wire.weights import ModelDescription, Shard

from .staging import Staged


class LiveWeights(Protocol):
    """The tensors of a rank's model: where they are, and how others take their place."""

    device: torch.device

    def describe(self) -> ModelDescription:
        """Return the names, shapes and dtypes of the weights.

        Called on the link's thread. This may take seconds.
        """
        ...

    def checksums(self, names: Sequence[str]) -> list[Shard]:
        """Return the checksums of the shards of these weights on this rank."""
        ...

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return all tensors of the weights as the engine stores them, each storage once."""
        ...

    def reading(self) -> AbstractContextManager[Any]:
        """Return a context for reading ``tensors`` on another thread than the engine's.

        Several threads may read at the same time.
        """
        ...

    def spare(self, names: Sequence[str]) -> Staged | None:
        """Return memory for these tensors that becomes live without a copy.

        The caller fills the memory, then calls ``WeightEngine.staged`` with None. The engine keeps
        the memory until it becomes live. Weights in no tensor of ``names`` already have their live
        values there.

        Returns:
            The tensors by name. None if the engine has no such memory, or none for these tensors.
        """
        ...

    def settle(self) -> None:
        """Prepare for the next ``spare``. Call this when time is available."""
        ...

    def targets(self, names: Sequence[str]) -> list[torch.Tensor] | None:
        """Return the live tensors of these weights, to receive into without a copy.

        None unless all of them are contiguous and have the sizes of the named weights.
        """
        ...

    def bind(self, staged: Staged) -> Any:
        """Find the target of every part of these tensors, for ``copy`` and ``staged``."""
        ...

    def copy(self, bound: Any) -> None:
        """Copy into the live weights now. The engine must be held."""
        ...


class WeightEngine(Protocol):
    """The steps of an engine, and the updates that become live between them.

    The channel's threads call ``commit`` and ``hold``. The scheduler's thread then performs them,
    on all ranks between the same two steps.
    """

    @property
    def live(self) -> LiveWeights: ...

    def staged(self, update: int, bound: Any) -> None:
        """Take all tensors of this update, which have arrived.

        The engine keeps them until ``commit`` or ``release`` of the same update, or ``forget``.

        Args:
            bound: the result of ``LiveWeights.bind``. None if the tensors are in ``spare``.
        """
        ...

    def nearly_staged(self, seconds: float, exchanged: bool) -> None:
        """Announce that all tensors will have arrived in about ``seconds``, about one step.

        Args:
            exchanged: the tensors arrive in ``LiveWeights.spare``.
        """
        ...

    def step_seconds(self) -> float:
        """Return the current duration of a step, in seconds."""
        ...

    def forget(self) -> None:
        """Drop the staged update, and the announcement of ``nearly_staged``."""
        ...

    def commit(self, update: int, version: int, inflight: str) -> None:
        """Make the staged update live between two steps, then call ``RankWeights.committed``.

        If a replica has several ranks, the first rank's call acts on all of them.
        """
        ...

    def hold(self, update: int, inflight: str) -> None:
        """Stop between two steps until ``release``."""
        ...

    def held(self, update: int, timeout: float) -> bool:
        """Wait until the engine is held for this update.

        Returns:
            False after ``timeout`` seconds, and at once if this hold was released.
        """
        ...

    def release(self, update: int, version: int | None, *, staged: bool = False) -> float:
        """End the hold of this update, and cancel pending holds of this and earlier updates.

        Args:
            version: the version of the weights from now on. None keeps the version.
            staged: make the tensors ``staged`` for this update live first, then call
                ``RankWeights.committed``. Tensors staged for another update stay staged.

        Returns:
            Milliseconds for which the engine was held.
        """
        ...


@contextmanager
def overwriting(engine: WeightEngine, id_: int, version: int, timeout: float) -> Iterator[None]:
    """Hold the engine for the block, which overwrites all live weights with those of ``version``.

    If the block raises, the weights are of no version, and the driver ends the worker.

    Args:
        id_: the id of the message that asks for the copy.
        timeout: seconds for the engine to stop.

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
