"""Prepare an update on one rank: check the manifest, and allocate memory for the update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglrl.core.manifest import Layout, check_manifest, lay_out
from sglrl.wire.weights import ModelDescription, Prepare

from .side_stream import SideStream
from .staging import KEPT_BYTES, Staged, Update
from .staging_memory import RING_BYTES, StagingMemory, choose
from .weight_engine import LiveWeights

IN_FLIGHT = 3
"""Maximum number of buckets that a GPU receives and unpacks at the same time."""


class Preparation:
    """Prepares updates, one at a time. The next update may use the memory of the last one.

    Args:
        describe: returns the tensors of the model on this rank.
    """

    def __init__(
        self,
        live: LiveWeights,
        describe: Callable[[], ModelDescription],
        memory: StagingMemory,
        stream: SideStream,
    ) -> None:
        self._live = live
        self._describe = describe
        self._memory = memory
        self._stream = stream
        self._manifest: tuple[tuple[Any, ...], Layout] | None = None
        self._kept: Update | None = None
        """The last update, if the next one may use its memory."""
        self._spent: Update | None = None
        """The last update, until ``free`` frees its memory."""

    def prepare(self, message: Prepare, *, dirty: bool) -> Update:
        """Check the manifest, and return an update with allocated memory.

        Args:
            dirty: whether some live weights are new and some are old. The engine is then still
                held, so the update overwrites them in place.

        Raises:
            InvalidWeights: the manifest does not fit the model, or there is no room.
        """
        kept, self._kept = self._kept, None
        if kept is not None and kept.serves(message):
            update = kept.again(message)
            if update.spare is None or self._spare(message) is not None:
                return update
            # There is no room for the spare memory any more.
            del update
        # Free the kept memory, because the new update may need the room.
        del kept
        return self._first(message, dirty)

    def committed(self, update: Update) -> None:
        """Keep the memory of a live update, if the next update may use it."""
        if update.worth_keeping:
            self._kept = update
            if update.spare is not None and update.layout.total > KEPT_BYTES:
                update.forget_memory()
        else:
            self._spent = update

    def free(self) -> None:
        """Free the memory of the last update, and prepare the engine for the next update."""
        self._spent = None
        self._live.settle()

    def _first(self, message: Prepare, dirty: bool) -> Update:
        """Check the manifest, and allocate the memory of an update."""
        layout = self._checked(message)
        in_place = dirty or message.mode == "bucketed"
        if not in_place:
            update = Update(message, layout, "full", layout.total)
            update.spare = self._spare(message)
            if update.spare is not None and self._has_room_to_unpack(update):
                return update
        room = self._memory.room(RING_BYTES if in_place else layout.total)
        wanted = "bucketed" if in_place else message.mode
        mode, sizes = choose(wanted, layout, room, must_fit=not dirty)
        update = Update(message, layout, mode, room)
        with self._stream.use():
            update.memory = self._memory.allocate_all(sizes)
        return update

    def _spare(self, message: Prepare) -> Staged | None:
        """Return the engine's spare memory for new weights, or None if the engine has none."""
        with self._stream.use():
            return self._live.spare([spec.name for spec in message.tensors])

    def _has_room_to_unpack(self, update: Update) -> bool:
        """Return True if there is room for the buckets that cannot arrive directly in ``spare``."""
        layout = update.layout
        if all(map(update.in_pieces, range(len(layout.sizes)))):
            return True
        on_gpu = self._stream.device.type == "cuda"
        wanted = IN_FLIGHT * layout.ring_slot if on_gpu else max(layout.sizes)
        return self._memory.room(wanted) >= wanted

    def _checked(self, message: Prepare) -> Layout:
        """Check that the manifest fits the model, and return its layout.

        The last manifest is cached, because a trainer sends the same manifest each time, and
        checking a few hundred names takes a millisecond.
        """
        manifest = (message.tensors, message.bucket_bytes, message.partial, message.source)
        if self._manifest is None or self._manifest[0] != manifest:
            description = self._describe()
            # Ignored names may be experts of other ranks. The driver knows the tensors of all
            # ranks, and has checked these names.
            elsewhere = set(description.ignored)
            mine = [spec for spec in message.tensors if spec.name not in elsewhere]
            if not message.source and (mine or not message.partial):
                check_manifest(description, mine, partial=message.partial)
            self._manifest = (manifest, lay_out(message.tensors, message.bucket_bytes))
        return self._manifest[1]
