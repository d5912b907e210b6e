"""The weights of the fake engine: a checksum of each tensor, and no values.

The checksums are in one tensor of a fixed size. Updates, copies to other workers and copies to the
memory of the host therefore work as they do for SGLang's weights, for any names and shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import torch

from sglrl.errors import InvalidWeights
from sglrl.weights.checksum import checksum
from sglrl.wire.weights import ModelDescription, Shard

from ..weights.holds import Holds

if TYPE_CHECKING:
    from ..weights.rank_channel import RankWeights

_TABLE_BYTES = 8 << 20
"""Size of the table in bytes, for the checksums of about 60,000 tensors."""
_HEAD = 8
"""Size in bytes of the table's first field, which stores the length of the encoded checksums."""


class Scheduler(Protocol):
    """The parts of the fake engine that change its weights between two steps.

    The channel's threads call ``order`` with a method of ``FakeWeights``. The engine's thread
    later calls that method.
    """

    def order(self, work: Any, inflight: str, is_over: Any) -> None: ...

    def switch(self, version: int) -> None: ...

    def wake(self) -> None: ...


class ChecksumTable:
    """Implements ``LiveWeights``: the checksum of each tensor that was received."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self._table = torch.zeros(_TABLE_BYTES, dtype=torch.uint8)

    def describe(self) -> ModelDescription:
        return ModelDescription([], [], open=True)

    def checksums(self, names: Sequence[str]) -> list[Shard]:
        known = self._known()
        if missing := [name for name in names if name not in known]:
            raise InvalidWeights(
                f"engine='fake' has received no weights of the names {', '.join(missing[:8])}"
            )
        return [known[name] for name in names or known]

    def _known(self) -> dict[str, Shard]:
        data = self._table.numpy()
        size = int.from_bytes(data[:_HEAD].tobytes(), "little")
        if not size:
            return {}
        shards = msgspec.msgpack.decode(data[_HEAD : _HEAD + size].data, type=list[Shard])
        return {shard.name: shard for shard in shards}

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"checksums": self._table}

    def reading(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def spare(self, names: Sequence[str]) -> None:
        return None

    def settle(self) -> None:
        pass

    def targets(self, names: Sequence[str]) -> None:
        return None

    def bind(self, staged: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return staged

    def copy(self, bound: dict[str, torch.Tensor]) -> None:
        self.keep(self.table_with(bound))

    def table_with(self, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the content of the table, extended by the checksums of these tensors.

        Raises:
            InvalidWeights: the table has no room for the checksums.
        """
        body = msgspec.msgpack.encode([*{**self._known(), **_shards(tensors)}.values()])
        if len(body) > _TABLE_BYTES - _HEAD:
            raise InvalidWeights(f"engine='fake' has no room for {len(tensors)} checksums")
        return torch.frombuffer(
            bytearray(len(body).to_bytes(_HEAD, "little") + body), dtype=torch.uint8
        )

    def keep(self, table: torch.Tensor) -> None:
        self._table[: len(table)] = table


class FakeWeights:
    """Implements ``WeightEngine``."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.channel: RankWeights
        self._scheduler = scheduler
        self.live = ChecksumTable()
        self._holds = Holds()
        self._ready: tuple[int, torch.Tensor] | None = None

    # --- on the channel's threads -----------------------------------------------------------------

    def staged(self, update: int, bound: dict[str, torch.Tensor]) -> None:
        # The engine runs during this computation. The commit only stores the checksums.
        self._ready = (update, self.live.table_with(bound))

    def nearly_staged(self, seconds: float, exchanged: bool) -> None:
        pass

    def step_seconds(self) -> float:
        return 0.0

    def forget(self) -> None:
        self._ready = None

    def commit(self, update: int, version: int, inflight: str) -> None:
        self._scheduler.order(lambda: self._apply(update, version), inflight, lambda: False)

    def hold(self, update: int, inflight: str) -> None:
        self._holds.of(update)
        self._scheduler.order(
            lambda: self._hold(update), inflight, lambda: self._holds.is_over(update)
        )

    def held(self, update: int, timeout: float) -> bool:
        return self._holds.held(update, timeout)

    def release(self, update: int, version: int | None, *, staged: bool = False) -> float:
        milliseconds = self._holds.release(update, version, staged=staged)
        # The engine may still drain its requests for a hold that is over now.
        self._scheduler.wake()
        return milliseconds

    # --- on the engine's thread -------------------------------------------------------------------

    def _apply(self, update: int, version: int) -> None:
        ready, self._ready = self._ready, None
        if ready is None or ready[0] != update:
            self.channel.committed(update, lambda: 0.0, "nothing is staged for this update")
            return
        self.live.keep(ready[1])
        self._scheduler.switch(version)
        self.channel.committed(update, lambda: 0.0)

    def _hold(self, update: int) -> None:
        hold = self._holds.of(update)
        if hold is None:
            return
        hold.wait()
        if hold.version is None:
            return
        if hold.staged is not None:
            self._apply(hold.staged, hold.version)
        else:
            self._scheduler.switch(hold.version)


def _shards(tensors: dict[str, torch.Tensor]) -> dict[str, Shard]:
    return {
        name: Shard(name, 0, tuple(tensor.shape), tensor.stride(), checksum(tensor))
        for name, tensor in tensors.items()
    }
