"""Apply new weights to a running SGLang engine.

New weights become live between two steps, on the scheduler's thread. Rank 0 puts a
``WeightCommand`` among the requests that SGLang broadcasts to all ranks, so every rank of a replica
applies the weights at the same place in its loop.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ...weights.holds import Holds
from . import compat
from .commands import WeightCommand
from .model_weights import ModelWeights

if TYPE_CHECKING:
    from ...weights.rank_channel import RankWeights


class SglangWeights:
    """Implements ``WeightEngine`` for one rank's scheduler."""

    def __init__(self, scheduler: Any, device: torch.device) -> None:
        self.live = ModelWeights(scheduler, device)
        self.channel: RankWeights
        self._scheduler = scheduler
        self._ready: tuple[int, Any] | None = None
        self._holds = Holds()
        self._at_rest: Any = None
        """CUDA event at the end of the last step. None while steps are launched."""

    # --- on the channel's threads -----------------------------------------------------------------

    def staged(self, update: int, bound: Any) -> None:
        self._ready = (update, bound)

    def nearly_staged(self, seconds: float, exchanged: bool) -> None:
        if self._scheduler.sglrl_adapter is not None:
            self._scheduler.sglrl_adapter.draining.commands.expect(seconds if exchanged else None)

    def step_seconds(self) -> float:
        return float(self._scheduler.sglrl_steps.recent)

    def forget(self) -> None:
        self._ready = None
        if self._scheduler.sglrl_adapter is not None:
            self._scheduler.sglrl_adapter.draining.commands.expect_none()

    def commit(self, update: int, version: int, inflight: str) -> None:
        self._command(WeightCommand(update, version, inflight, hold=False))

    def hold(self, update: int, inflight: str) -> None:
        self._holds.of(update)
        self._command(WeightCommand(update, 0, inflight, hold=True))

    def held(self, update: int, timeout: float) -> bool:
        return self._holds.held(update, timeout)

    def release(self, update: int, version: int | None, *, staged: bool = False) -> float:
        return self._holds.release(update, version, staged=staged)

    def given_up(self, command: WeightCommand) -> bool:
        """Return True for a hold that was already released. Return False for other commands."""
        return command.hold and self._holds.is_over(command.update)

    def _command(self, command: WeightCommand) -> None:
        adapter = self._scheduler.sglrl_adapter
        if adapter is not None:
            adapter.draining.commands.put(command)

    # --- on the scheduler's thread ----------------------------------------------------------------

    def rest(self) -> None:
        """Record that no step is launched until the next update is live or aborted."""
        self._at_rest = torch.cuda.Event(enable_timing=True)
        self._at_rest.record(self.live.stream)

    def go_on(self) -> None:
        """Record that steps are launched again."""
        self._at_rest = None

    def execute(self, command: WeightCommand) -> None:
        """Execute a command between two steps."""
        if command.inflight == "retract":
            # SGLang then computes the KV of these requests again, with the new weights. Retract
            # even if this rank has already released the hold: the other ranks may not have
            # released it yet, and all ranks must run the same batches.
            self._scheduler.sglrl_retract()
        if self.given_up(command):
            return
        if command.hold:
            self._hold(command)
        else:
            self._apply(command)

    def _apply(self, command: WeightCommand, held_since: float | None = None) -> None:
        ready = self._ready
        if ready is None or ready[0] != command.update:
            self.channel.committed(command.update, lambda: 0.0, "nothing is staged for this update")
            return
        self._ready = None
        runner = self._scheduler.tp_worker.model_runner
        begun = time.perf_counter() if held_since is None else held_since
        if self.live.device.type == "cuda":
            stream = self.live.stream
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            with torch.no_grad(), torch.cuda.stream(stream):
                start.record()
                if self._at_rest is not None:
                    start, self._at_rest = self._at_rest, None
                compat.begin_weight_update(runner)
                self.live.make_live(ready[1])
                compat.end_weight_update(runner)
                end.record()

            def pause() -> float:
                end.synchronize()
                if held_since is not None:
                    return (time.perf_counter() - held_since) * 1e3
                return float(start.elapsed_time(end))

        else:
            with torch.no_grad():
                compat.begin_weight_update(runner)
                self.live.make_live(ready[1])
                compat.end_weight_update(runner)
            took = (time.perf_counter() - begun) * 1e3

            def pause() -> float:
                return took

        self._switch(command.version)
        # The staged memory must outlive the copies, so the channel drops it after ``pause``.
        self.channel.committed(command.update, pause)

    def _hold(self, command: WeightCommand) -> None:
        hold = self._holds.of(command.update)
        if hold is None:
            return
        self.live.synchronize()
        hold.wait()
        if hold.version is None:
            return
        if hold.staged is not None:
            applied = replace(command, update=hold.staged, version=hold.version)
            self._apply(applied, hold.begun)
            return
        runner = self._scheduler.tp_worker.model_runner
        compat.begin_weight_update(runner)
        compat.end_weight_update(runner)
        self._switch(hold.version)

    def _switch(self, version: int) -> None:
        """Use this version of the weights from the next step on."""
        self._scheduler.sglrl_version = version
        self._scheduler.sglrl_weight_changes += 1
        self._scheduler.sglrl_new_keys()
        self._scheduler.sglrl_filled()
