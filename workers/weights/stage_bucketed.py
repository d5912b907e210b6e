"""Receive an update directly into the live weights, because a second copy of them does not fit."""

from __future__ import annotations

import collections
import contextlib
from typing import Any

from sglrl.errors import WeightUpdateError
from sglrl.weights.link import Link

from .current_update import CurrentUpdate
from .side_stream import SideStream
from .staging import Nothing, Slots, Staged, Update, broadcast
from .weight_engine import WeightEngine


class BucketedStage:
    """Receives buckets into the live weights while the scheduler is held.

    A bucket goes through a ring of slots if it arrives before the scheduler is held, or if it does
    not have the layout of the live tensors.
    """

    def __init__(self, engine: WeightEngine, current: CurrentUpdate, stream: SideStream) -> None:
        self._engine = engine
        self._current = current
        self._stream = stream

    def receive(self, link: Link, update: Update, timeout: float) -> None:
        """Receive all buckets.

        Args:
            timeout: maximum seconds until the engine is held.
        """
        engine, group, layout = self._engine, link.group, update.layout
        live = engine.live
        if not self._current.dirty and update.message.inflight != "drain":
            engine.hold(update.id, update.message.inflight)
        slots = Slots(update)
        waiting: collections.deque[tuple[int, Any, Staged]] = collections.deque()
        straight = []

        def apply_oldest() -> None:
            bucket, work, views = waiting.popleft()
            work.wait()
            if not self._is_held(update, timeout):
                raise WeightUpdateError("the engine did not stop in time")
            with self._current.writing(link, update.id):
                self._current.dirty = True
                live.copy(live.bind(views))
            slots.free(bucket)

        with group.deadline() if group is not None else contextlib.nullcontext():
            for bucket, size in enumerate(layout.sizes):
                link.check()
                in_pieces = group is not None and group.takes_pieces and update.in_pieces(bucket)
                targets = live.targets(update.names(bucket)) if in_pieces and bucket else None
                if group is not None and targets and self._is_held(update, 0):
                    with self._current.writing(link, update.id):
                        self._current.dirty = True
                        straight.append(group.broadcast(targets))
                    continue
                while not slots.has_room(bucket):
                    apply_oldest()
                data = slots.take(bucket)[:size]
                views = update.views(bucket, data)
                work: Any = Nothing
                if group is not None:
                    work = broadcast(group, update, bucket, data, views)
                else:
                    assert link.reader is not None
                    link.reader.receive(update.id, bucket, data.copy_)
                waiting.append((bucket, work, views))
                if group is not None and not bucket:
                    # The sender checks the weights before it sends the first bucket. Do not
                    # overwrite live weights before this bucket has arrived.
                    work.wait()
                    group.synchronize()
                if self._is_held(update, 0):
                    # The scheduler is already held, so copy at once.
                    apply_oldest()
            # Copy after all broadcasts are launched. Later broadcasts would wait for the copies.
            while waiting:
                apply_oldest()
            for work in straight:
                work.wait()
            if group is not None:
                group.synchronize()
        self._stream.synchronize()

    def _is_held(self, update: Update, timeout: float) -> bool:
        """Wait until the engine is held, for at most ``timeout`` seconds. Return False after that.

        If some live weights are new already, the engine is held and this does not wait.
        """
        return self._current.dirty or self._engine.held(update.id, timeout)
