"""Receive an update into staging memory. The engine copies it when it becomes live."""

from __future__ import annotations

import torch

from sglrl.weights.link import Link

from .announcements import Announcements, arrival
from .staging import Update, broadcast
from .weight_engine import WeightEngine


class FullStage:
    """Receives all buckets into staging memory, while the scheduler continues."""

    def __init__(self, engine: WeightEngine, announcements: Announcements) -> None:
        self._engine = engine
        self._announcements = announcements

    def receive(self, link: Link, update: Update) -> None:
        group = link.group
        if group is None:
            assert link.reader is not None
            for bucket, data in enumerate(update.memory):
                link.reader.receive(update.id, bucket, data.copy_)
            update.bind(self._engine.bind)
            return
        on_cpu = self._engine.device.type == "cpu"
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
            update.bind(self._engine.bind)
            if arrivals and not update.drained:
                self._announcements.watch(link, update, arrivals)
            group.synchronize()
