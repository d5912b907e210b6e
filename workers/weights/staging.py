"""What a rank receives an update into, until it is live."""

from __future__ import annotations

import copy
from typing import Any

import torch

from sglrl.core.manifest import Layout, by_bucket, in_pieces
from sglrl.wire.weights import Prepare

KEPT_BYTES = 2 << 30
"""Staging memory up to this size is kept from one update to the next, with all that was made to
copy it: for a small model that takes longer than its weights do."""

Staged = dict[str, torch.Tensor]


class Update:
    """What a rank knows of the update under way."""

    def __init__(self, message: Prepare, layout: Layout, mode: str, room: int) -> None:
        self.id = message.id
        self.message = message
        self.layout = layout
        self.mode = mode
        self.room = room
        self.memory: list[torch.Tensor] = []
        self.staged: list[Staged] = []
        """The buckets in ``memory`` as their tensors."""
        self.bound: Any = None
        """What the engine needs to copy them."""
        self.spare: Staged | None = None
        """Where they go instead, if the engine has such memory: a bucket that comes in one piece
        comes into ``memory`` first."""
        self._unpacking: dict[int, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        self._within = by_bucket(layout)

    @property
    def drained(self) -> bool:
        """The engine is held from ``Prepare`` on, when what ran has ended."""
        return self.message.inflight == "drain"

    @property
    def worth_keeping(self) -> bool:
        """For the next update: what it holds costs no memory, or little."""
        little = self.layout.total <= KEPT_BYTES
        return self.mode == "full" and (little or self.spare is not None)

    def in_pieces(self, bucket: int) -> bool:
        return in_pieces(self.layout, self._within[bucket])

    def spare_views(self, bucket: int) -> Staged:
        """The bucket's tensors in ``spare``."""
        assert self.spare is not None
        return {name: self.spare[name] for name in self.names(bucket)}

    def names(self, bucket: int) -> list[str]:
        return [self.message.tensors[index].name for index in self._within[bucket]]

    def unpack(self, bucket: int, data: torch.Tensor, *, again: bool = False) -> None:
        """The bucket's bytes to ``spare``. ``again``: so will the next update's be, from the same
        memory."""
        copies = self._unpacking.get(bucket)
        if copies is None:
            to, views = self.spare_views(bucket).values(), self.views(bucket, data).values()
            copies = (list(to), list(views))
            if again:
                self._unpacking[bucket] = copies
        torch._foreach_copy_(*copies)

    def forget_memory(self) -> None:
        self.memory = []
        self._unpacking.clear()

    def views(self, bucket: int, memory: torch.Tensor) -> Staged:
        """The bucket's memory as its tensors."""
        found: Staged = {}
        for index in self._within[bucket]:
            place, spec = self.layout.places[index], self.message.tensors[index]
            flat = memory[place.offset : place.offset + place.nbytes]
            found[spec.name] = flat.view(getattr(torch, spec.dtype)).view(spec.shape)
        return found

    def serves(self, message: Prepare) -> bool:
        """The next update wants what this one has."""
        mine = self.message
        return (
            message.mode in ("auto", self.mode)
            and message.bucket_bytes == mine.bucket_bytes
            and not message.source
            and message.partial == mine.partial
            and message.tensors == mine.tensors
        )

    def again(self, message: Prepare) -> Update:
        """For the next update, with the memory of this one."""
        update = copy.copy(self)
        update.id, update.message = message.id, message
        return update


class Nothing:
    """Stands for a broadcast that is over."""

    @staticmethod
    def wait() -> None:
        pass


class Slots:
    """Memory of a bucketed update: slots in turn, and one for what is larger than a slot. A slot is
    taken again only behind what its bucket's copies put on the stream."""

    def __init__(self, update: Update) -> None:
        self._layout = update.layout
        slot = update.layout.ring_slot
        self._large = [m for m in update.memory if m.numel() > slot]
        self._small = [m for m in update.memory if m.numel() <= slot]
        self._used: dict[int, tuple[list[torch.Tensor], torch.Tensor]] = {}

    def _pool(self, bucket: int) -> list[torch.Tensor]:
        large = self._layout.sizes[bucket] > self._layout.ring_slot
        return self._large if large else self._small

    def has_room(self, bucket: int) -> bool:
        return bool(self._pool(bucket))

    def take(self, bucket: int) -> torch.Tensor:
        pool = self._pool(bucket)
        memory = pool.pop(0)
        self._used[bucket] = (pool, memory)
        return memory

    def free(self, bucket: int) -> None:
        pool, memory = self._used.pop(bucket)
        pool.append(memory)
