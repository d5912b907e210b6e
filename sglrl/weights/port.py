"""The interfaces for weight updates that a client uses. Local and remote pools implement them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from ..core.weight_update import Member
from ..wire.weights import ModelDescription, Shard
from .update_report import UpdateReport
from .update_request import UpdateRequest


class WeightsPort(Protocol):
    """Reads the version, the description and the checksums of a pool's weights.

    ``WeightChannel`` implements the interface for a local pool, ``remote.pool.RemoteWeights`` for
    a remote pool.
    """

    @property
    def version(self) -> int:
        """Policy version of the last update, or 0 before the first update."""
        ...

    @property
    def on_version(self) -> set[Callable[[], None]]:
        """Functions to call after a change of ``version`` or of the version of an adapter."""
        ...

    @property
    def address(self) -> str:
        """The address for ``sglrl.weights.Sender.connect``. It contains a secret."""
        ...

    @property
    def host(self) -> str:
        """The address at which workers reach a sender on this machine."""
        ...

    async def describe(self, timeout: float | None) -> ModelDescription:
        """Return the tensors of the model."""
        ...

    async def checksums(self, names: list[str], timeout: float | None) -> dict[Member, list[Shard]]:
        """Return checksums of live tensor shards by rank. Wait for a running update first."""
        ...


class WeightSender(Protocol):
    """Sends tensors of this process to a pool's workers. ``Client`` documents the methods.

    ``LocalSender`` implements the interface for a local pool, ``remote.client`` for a remote pool.
    """

    async def connect(self, device: Any, host: str | None, timeout: float) -> float: ...

    async def update(
        self, weights: Any, request: UpdateRequest, *, device: Any = None, host: str | None = None
    ) -> UpdateReport: ...

    async def close(self) -> None:
        """Free the sender's memory. The pool is already closed, so a running update fails."""
        ...
