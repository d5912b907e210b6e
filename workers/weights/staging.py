"""The state and the memory of an update that a rank receives, before the update is live."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from sglrl.core.manifest import Layout, by_bucket, in_pieces
from sglrl.weights.group import Group
from sglrl.wire.weights import Prepare

KEPT_BYTES = 2 << 30
"""The maximum size of staging memory that a rank keeps for the next update.

The rank also keeps the views into this memory. For a small model, making the views takes longer
than receiving the weights.
"""

Staged = dict[str, torch.Tensor]


class Update:
    """The state of the current update on one rank.

    Args:
        message: the driver's ``Prepare``, with the manifest.
        layout: the place of each tensor in the buckets.
        mode: "full" stages all weights before they become live; "bucketed" writes bucket after
            bucket into the live weights while the engine is held.
        room: the number of bytes that staging may use.

    Attributes:
        memory: one tensor of bytes for each bucket, or for each slot of a ring.
        staged: the tensors of each bucket, as views of ``memory``.
        bound: the result of ``LiveWeights.bind``.
        spare: the tensors in the engine's spare memory, by name. None if the engine has no spare
            memory for the update. With ``spare``, only a bucket that arrives as one piece is
            received into ``memory``, and is then unpacked.
    """

    def __init__(self, message: Prepare, layout: Layout, mode: str, room: int) -> None:
        self.id = message.id
        self.message = message
        self.layout = layout
        self.mode = mode
        self.room = room
        self.memory: list[torch.Tensor] = []
        self.staged: list[Staged] = []
        self.bound: Any = None
        self.spare: Staged | None = None
        self._unpacking: dict[int, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        self._within = by_bucket(layout)

    @property
    def drained(self) -> bool:
        """True if PREPARE waits until the running requests finish, and then holds the engine."""
        return self.message.inflight == "drain"

    @property
    def worth_keeping(self) -> bool:
        """True if the next update may use this memory: it is small, or it is ``spare``."""
        little = self.layout.total <= KEPT_BYTES
        return self.mode == "full" and (little or self.spare is not None)

    def in_pieces(self, bucket: int) -> bool:
        """Return True if the bucket's tensors may arrive separately."""
        return in_pieces(self.layout, self._within[bucket])

    def spare_views(self, bucket: int) -> Staged:
        """Return the bucket's tensors in ``spare``, by name."""
        assert self.spare is not None
        return {name: self.spare[name] for name in self.names(bucket)}

    def names(self, bucket: int) -> list[str]:
        """Return the names of the bucket's tensors."""
        return [self.message.tensors[index].name for index in self._within[bucket]]

    def unpack(self, bucket: int, data: torch.Tensor, *, again: bool = False) -> None:
        """Copy the bytes of a bucket to its tensors in ``spare``.

        Args:
            again: whether to keep the views of ``data``, because ``data`` will be used again.
        """
        copies = self._unpacking.get(bucket)
        if copies is None:
            to, views = self.spare_views(bucket).values(), self.views(bucket, data).values()
            copies = (list(to), list(views))
            if again:
                self._unpacking[bucket] = copies
        torch._foreach_copy_(*copies)

    def forget_memory(self) -> None:
        """Free ``memory`` and all views of it that ``unpack`` keeps."""
        self.memory = []
        self._unpacking.clear()

    def views(self, bucket: int, memory: torch.Tensor) -> Staged:
        """Return the tensors of a bucket as views of ``memory``, by name."""
        views: Staged = {}
        for index in self._within[bucket]:
            place, spec = self.layout.places[index], self.message.tensors[index]
            flat = memory[place.offset : place.offset + place.nbytes]
            views[spec.name] = flat.view(getattr(torch, spec.dtype)).view(spec.shape)
        return views

    def bind(self, bind: Callable[[Staged], Any]) -> None:
        """Call ``bind`` with all staged tensors, unless they are in ``spare`` or already bound."""
        if self.bound is None and self.spare is None:
            for bucket in range(len(self.staged), len(self.memory)):
                self.staged.append(self.views(bucket, self.memory[bucket]))
            self.bound = bind({k: v for views in self.staged for k, v in views.items()})

    def serves(self, message: Prepare) -> bool:
        """Return True if an update with this ``Prepare`` can use the memory of this update."""
        mine = self.message
        return (
            message.mode in ("auto", self.mode)
            and message.bucket_bytes == mine.bucket_bytes
            and not message.source
            and message.partial == mine.partial
            and message.tensors == mine.tensors
        )

    def again(self, message: Prepare) -> Update:
        """Return the next update, which uses the memory of this update."""
        update = copy.copy(self)
        update.id, update.message = message.id, message
        return update


def broadcast(group: Group, update: Update, bucket: int, data: torch.Tensor, views: Staged) -> Any:
    """Receive a bucket into ``data`` or its ``views``. Return the work handle to wait for."""
    pieces = group.takes_pieces and update.in_pieces(bucket)
    return group.broadcast(list(views.values()) if pieces else [data])


class Nothing:
    """The work handle of a transfer that has already finished."""

    @staticmethod
    def wait() -> None:
        pass


class Slots:
    """The memory of a bucketed update: a ring of slots, and one large slot for larger buckets.

    A slot is reused only after the copies of its bucket were launched on the stream.
    """

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
        """Return True if a slot for this bucket is free."""
        return bool(self._pool(bucket))

    def take(self, bucket: int) -> torch.Tensor:
        """Return a free slot for a bucket. The bucket owns the slot until ``free``."""
        pool = self._pool(bucket)
        memory = pool.pop(0)
        self._used[bucket] = (pool, memory)
        return memory

    def free(self, bucket: int) -> None:
        """Make the slot of a bucket available for another bucket."""
        pool, memory = self._used.pop(bucket)
        pool.append(memory)
