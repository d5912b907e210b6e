"""Receive an update into separate memory, while the scheduler continues with the live weights."""

from __future__ import annotations

import collections
import functools
import itertools
from typing import Any

import torch

from sglrl.weights.group import Group
from sglrl.weights.link import Link

from .announcements import Announcements, arrival
from .current_update import CurrentUpdate
from .preparation import IN_FLIGHT
from .side_stream import SideStream
from .staging import Update, broadcast
from .staging_memory import StagingMemory
from .weight_engine import LiveWeights


class FullStage:
    """Receives all buckets into staging memory. Later the engine copies them to the live memory."""

    def __init__(self, live: LiveWeights, announcements: Announcements) -> None:
        self._live = live
        self._announcements = announcements

    def receive(self, link: Link, update: Update) -> None:
        group = link.group
        if group is None:
            assert link.reader is not None
            for bucket, data in enumerate(update.memory):
                link.reader.receive(update.id, bucket, data.copy_)
            update.bind(self._live.bind)
            return
        on_cpu = self._live.device.type == "cpu"
        staged = update.staged
        with group.deadline():
            works = []
            for bucket, data in enumerate(update.memory):
                link.check()
                if bucket == len(staged):
                    staged.append(update.views(bucket, data))
                works.append(broadcast(group, update, bucket, data, staged[bucket]))
                if on_cpu:
                    works[-1].wait()
            arrivals: list[torch.cuda.Event] = []
            for work in [] if on_cpu else works:
                work.wait()
                arrivals.append(arrival())
            update.bind(self._live.bind)
            if arrivals and not update.drained:
                self._announcements.watch(link, update, arrivals)
            group.synchronize()


class SpareStage:
    """Receives all buckets into the spare memory, which is later exchanged with the live memory."""

    def __init__(
        self,
        current: CurrentUpdate,
        memory: StagingMemory,
        stream: SideStream,
        announcements: Announcements,
    ) -> None:
        self._current = current
        self._memory = memory
        self._stream = stream
        self._announcements = announcements

    def receive(self, link: Link, update: Update) -> None:
        if link.group is not None:
            self._receive(link, link.group, update)
            return
        assert link.reader is not None
        for bucket in range(len(update.layout.sizes)):
            unpack = functools.partial(self._unpack, link, update, bucket)
            link.reader.receive(update.id, bucket, unpack)
        self._stream.synchronize()

    def _receive(self, link: Link, group: Group, update: Update) -> None:
        buckets = range(len(update.layout.sizes))
        on_cpu = self._stream.device.type == "cpu"
        slots = 1 if on_cpu else IN_FLIGHT
        packed = {b for b in buckets if not (group.takes_pieces and update.in_pieces(b))}
        if len(update.memory) < min(slots, len(packed)):
            largest = max(update.layout.sizes[bucket] for bucket in packed)
            update.forget_memory()
            update.memory = self._memory.allocate([largest] * min(slots, len(packed)))
        turns = itertools.cycle(update.memory)
        waiting: collections.deque[tuple[int, Any, torch.Tensor | None]] = collections.deque()
        arrivals: list[torch.cuda.Event] = []
        link.check()
        announced = on_cpu or self._announcements.at_once(update)

        def arrive() -> None:
            bucket, work, data = waiting.popleft()
            work.wait()
            if data is not None:
                self._unpack(link, update, bucket, data, again=True)
            if not on_cpu:
                arrivals.append(arrival())

        with group.deadline():
            for bucket in buckets:
                link.check()
                if len(waiting) == slots:
                    arrive()
                data, pieces = None, list(update.spare_views(bucket).values())
                if bucket in packed:
                    data = next(turns)[: update.layout.sizes[bucket]]
                    pieces = [data]
                waiting.append((bucket, group.broadcast(pieces), data))
            while waiting:
                arrive()
            if arrivals and not announced:
                self._announcements.watch(link, update, arrivals)
            group.synchronize()
        self._announcements.measured(update, arrivals)

    def _unpack(
        self, link: Link, update: Update, bucket: int, data: torch.Tensor, *, again: bool = False
    ) -> None:
        with self._current.writing(link, update.id):
            update.unpack(bucket, data, again=again)
