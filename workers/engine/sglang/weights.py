"""Bring new weights into a running SGLang model. ``weight_plan`` finds each tensor's place.

New weights become live between two steps, on the scheduler's thread. Every rank of a replica does
this at the same place in its loop: rank 0 puts a ``WeightCommand`` among the requests that SGLang
broadcasts to all ranks.

If the whole model arrived in memory that can change places with the live memory, the two change
places. Otherwise the weights are copied.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from sglrl.errors import EngineError
from sglrl.weights.checksum import checksum
from sglrl.wire.engine import TensorValue
from sglrl.wire.weights import ModelDescription, Shard

from ...weights.holds import Holds
from . import compat
from .commands import WeightCommand
from .inspection import live_weights
from .weight_plan import Plan, Spare, checkpoint_folder, plan_of

if TYPE_CHECKING:
    from ...weights.double_buffer import Pages
    from ...weights.rank_channel import RankWeights

_SMALL = 4 << 20
"""Bytes. Copies below this size share one kernel."""


class SglangWeights:
    """Implements ``WeightEngine`` for one rank's scheduler."""

    def __init__(self, scheduler: Any, device: torch.device, rank: int) -> None:
        self.device = device
        self.channel: RankWeights
        self._scheduler = scheduler
        self._rank = rank
        self._plan: Plan | None = None
        self._ready: tuple[int, Any] | None = None
        self._holds = Holds()
        self._spare: Spare | None = None
        self._at_rest: Any = None
        """CUDA event of the last step's end, while no step is launched."""

    # --- on the channel's threads -----------------------------------------------------------------

    def describe(self) -> ModelDescription:
        if self._plan is None:
            config = self._scheduler.model_config
            if config.quantization is not None:
                raise EngineError(
                    f"weights quantized with {config.quantization} cannot be updated while they run"
                )
            args = self._scheduler.server_args
            folder = checkpoint_folder(args.model_path, args.revision, args.download_dir)
            self._plan = plan_of(self._model, folder, config.hf_config)
        return self._plan.description

    @property
    def _model(self) -> Any:
        return self._scheduler.tp_worker.model_runner.model

    def named(self, names: list[str]) -> list[TensorValue]:
        """Return copies of live tensors. See ``inspection.live_weights``."""
        self.describe()
        self._synchronize()
        with self.reading():
            return live_weights(self._plan, names)

    def checksums(self, names: Sequence[str]) -> list[Shard]:
        assert self._plan is not None
        self._synchronize()
        with self.reading():
            return [
                Shard(name, copy.offset, copy.size, copy.stride, checksum(copy.target))
                for name in names or self._plan.copies
                for copy in self._plan.copies.get(name, ())
            ]

    @property
    def pages(self) -> Pages | None:
        """The memory of the model's parameters; None: they are where SGLang has put them."""
        return getattr(self._scheduler.tp_worker.model_runner, "sglrl_pages", None)

    def reading(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.pages is None else self.pages.reading()

    def live(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        seen: set[int] = set()
        for name, tensor in sorted(self._model.state_dict().items()):
            # Tied weights have two names.
            if tensor.data_ptr() not in seen:
                seen.add(tensor.data_ptr())
                found[name] = tensor
        return found

    def spare(self, names: Sequence[str]) -> dict[str, torch.Tensor] | None:
        assert self._plan is not None
        pages = self.pages
        if pages is None or self._plan.copies.keys() != set(names):
            return None
        places = self._plan.places(pages.live) if self._spare is None else {}
        memory = None if places is None else pages.spare()
        if memory is None:
            return None
        if self._spare is None:
            assert places is not None
            self._spare = Spare(memory, places, self._plan.description.tensors)
        if pages.fresh:
            # An update brings no data for these gaps.
            for begin, end in self._spare.gaps:
                memory[begin:end].copy_(pages.live[begin:end])
        return self._spare.views

    def targets(self, names: Sequence[str]) -> list[torch.Tensor] | None:
        assert self._plan is not None
        found = [self._plan.straight.get(name) for name in names]
        return None if any(target is None for target in found) else found

    def bind(self, staged: dict[str, torch.Tensor]) -> Any:
        assert self._plan is not None
        return [
            (
                copy.target,
                tensor.as_strided(copy.size, copy.stride, tensor.storage_offset() + copy.offset),
            )
            for name, tensor in staged.items()
            # The plan has no copies for experts of other ranks.
            for copy in self._plan.copies.get(name, ())
        ]

    def copy(self, bound: Any) -> None:
        if self.device.type == "cpu":
            for target, source in bound:
                target.copy_(source)
            return
        small: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for target, source in bound:
            if target.numel() * target.element_size() >= _SMALL:
                target.copy_(source, non_blocking=True)
            else:
                targets, sources = small.setdefault(target.dtype, ([], []))
                targets.append(target)
                sources.append(source)
        for targets, sources in small.values():
            torch._foreach_copy_(targets, sources)

    def settle(self) -> None:
        if self.pages is not None:
            self.pages.settle()

    def staged(self, update: int, bound: Any) -> None:
        self._ready = (update, bound)

    def nearly_staged(self, seconds: float, exchanged: bool) -> None:
        if self._scheduler.sglrl_adapter is not None:
            self._scheduler.sglrl_adapter.draining.commands.expect(seconds if exchanged else None)

    def step_seconds(self) -> float:
        return float(self._scheduler.sglrl_step_seconds)

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
        """Return whether the update that asked for this hold is already over."""
        return command.hold and self._holds.is_over(command.update)

    def _command(self, command: WeightCommand) -> None:
        adapter = self._scheduler.sglrl_adapter
        if adapter is not None:
            adapter.draining.commands.put(command)

    # --- on the scheduler's thread ----------------------------------------------------------------

    def rest(self) -> None:
        """Record that no step is launched until the next update is live or given up."""
        self._at_rest = torch.cuda.Event(enable_timing=True)
        self._at_rest.record(self._stream())

    def go_on(self) -> None:
        """Record that a step is launched."""
        self._at_rest = None

    def release_memory(self, *, keep: bool) -> None:
        """Give the memory of the parameters back. The engine is idle, and no update runs.

        Args:
            keep: keep all values in the memory of the host. Otherwise this keeps only what an
                update of all weights does not bring.

        Raises:
            EngineError: the host has too little memory, or the weights cannot be updated, so they
                must be kept.
        """
        assert self.pages is not None
        self._synchronize()
        whole = [(0, self.pages.live.nbytes)]
        self.pages.release(whole if keep else self._not_updated(self.pages.live))

    def _not_updated(self, memory: torch.Tensor) -> list[tuple[int, int]]:
        """Return the byte ranges of the parameters' memory that no update writes."""
        self.describe()
        assert self._plan is not None
        written = []
        for copies in self._plan.copies.values():
            for copy in copies:
                begin = copy.target.data_ptr() - memory.data_ptr()
                if copy.target.is_contiguous() and 0 <= begin < memory.nbytes:
                    written.append((begin, begin + copy.target.nbytes))
        found, at = [], 0
        for begin, end in [*sorted(written), (memory.nbytes, memory.nbytes)]:
            if begin > at:
                found.append((at, begin))
            at = max(at, end)
        return found

    def restore_memory(self) -> None:
        """Take the memory of the parameters again, with the values that are kept."""
        assert self.pages is not None
        self.pages.restore()

    def drop_spare(self) -> None:
        """Free the memory that is kept for the next update."""
        if self.pages is not None:
            self.pages.drop_spare()

    def execute(self, command: WeightCommand) -> None:
        """Execute a command between two steps."""
        if self.given_up(command):
            return
        if command.inflight == "retract":
            # SGLang computes the KV of retracted requests again, with the new weights.
            self._scheduler.sglrl_retract()
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
        if self.device.type == "cuda":
            stream = self._stream()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            with torch.no_grad(), torch.cuda.stream(stream):
                start.record()
                if self._at_rest is not None:
                    start, self._at_rest = self._at_rest, None
                compat.begin_weight_update(runner)
                self._make_live(ready[1])
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
                self._make_live(ready[1])
                compat.end_weight_update(runner)
            took = (time.perf_counter() - begun) * 1e3

            def pause() -> float:
                return took

        self._switch(command.version)
        # The staged memory must outlive the copies. The channel drops it after the wait.
        self.channel.committed(command.update, pause)

    def _make_live(self, bound: Any) -> None:
        if bound is not None:
            self.copy(bound)
            return
        assert self.pages is not None
        self.pages.make_live()

    def _hold(self, command: WeightCommand) -> None:
        hold = self._holds.of(command.update)
        if hold is None:
            return
        self._synchronize()
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
        """Use a version from the next step on."""
        self._scheduler.sglrl_version = version
        self._scheduler.sglrl_weight_changes += 1
        self._scheduler.sglrl_new_keys()
        self._scheduler.sglrl_filled()

    def _stream(self) -> Any:
        """Return the stream on which the model's kernels run."""
        if self._scheduler.enable_overlap:
            return self._scheduler.forward_stream
        return torch.cuda.current_stream(self.device)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            self._stream().synchronize()
