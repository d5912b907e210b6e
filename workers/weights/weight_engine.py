"""What ``weights`` asks of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from sglrl.wire.weights import ModelDescription, Shard

from .staging import Staged


class WeightEngine(Protocol):
    """What an engine does for weight updates. ``commit`` and ``hold`` are asked for from the
    channel's threads and done on the scheduler's, on all ranks between the same two steps."""

    device: torch.device

    def describe(self) -> ModelDescription:
        """May take seconds; called on the link's thread."""
        ...

    def checksums(self, names: Sequence[str]) -> list[Shard]: ...

    def live(self) -> dict[str, torch.Tensor]:
        """All that makes up the weights, as the engine keeps them, each storage once."""
        ...

    def targets(self, names: Sequence[str]) -> list[torch.Tensor] | None:
        """The live tensors, contiguous and of the same sizes as those named, if they are such."""
        ...

    def reading(self) -> AbstractContextManager[Any]:
        """For who reads ``live`` on another thread than the engine's; several may."""
        ...

    def spare(self, names: Sequence[str]) -> Staged | None:
        """Memory for these tensors that becomes the live one without a copy, and is kept until it
        does: to be filled, then ``staged`` with None. What of the weights is in no such tensor is
        there already. None if the engine has none, or none for these."""
        ...

    def settle(self) -> None:
        """Get ready for the next ``spare``, now that there is time."""
        ...

    def bind(self, staged: Staged) -> Any:
        """Where every part of these tensors goes: for ``copy`` and ``commit``."""
        ...

    def copy(self, bound: Any) -> None:
        """Into the live weights, now. Only while the engine is held."""
        ...

    def staged(self, update: int, bound: Any) -> None:
        """All tensors of this update are here. Keep them until ``commit`` or ``release`` of the
        same update, or ``forget``. ``bound``: None if they are in ``spare``."""
        ...

    def nearly_staged(self, seconds: float, exchanged: bool) -> None:
        """All of it will be here in about so many seconds, which is about a step. ``exchanged``:
        in ``spare``."""
        ...

    def step_seconds(self) -> float:
        """What a step takes at present."""
        ...

    def forget(self) -> None:
        """What was staged, or nearly, is not wanted any more."""
        ...

    def commit(self, update: int, version: int, inflight: str) -> None:
        """Make it live between two steps, then call ``RankWeights.committed``. Where a replica has
        several ranks, the first one's call is for all of them."""
        ...

    def hold(self, update: int, inflight: str) -> None:
        """Stop between two steps, and stay there until ``release``."""
        ...

    def held(self, update: int, timeout: float) -> bool:
        """Wait until the engine is held for this update. False after ``timeout`` seconds, and at
        once if that hold was released."""
        ...

    def release(self, update: int, version: int | None, *, staged: bool = False) -> float:
        """Go on, with ``version`` from now on (None: as before); a hold of this update or of an
        earlier one that has not begun will not. Milliseconds that it was held.

        Args:
            staged: make what was ``staged`` for this update live first, then call
                ``RankWeights.committed``. What was staged for another update stays staged.
        """
        ...
