"""The weights of an SGLang model: the place of each tensor, and the memory that holds the tensors.

If the whole model has arrived in spare memory, the spare memory is exchanged with the live memory.
In all other cases, the new weights are copied into the live memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from sglrl.errors import EngineError, InvalidRequest, InvalidWeights
from sglrl.weights.checksum import checksum
from sglrl.wire.engine import TensorValue
from sglrl.wire.weights import ModelDescription, Shard, TensorSpec

from .weight_plan import Plan, Spare, checkpoint_folder, plan_of

if TYPE_CHECKING:
    from ...weights.double_buffer import Pages

_SMALL = 4 << 20
"""Maximum size in bytes of a tensor whose copy shares one kernel with other copies."""


class ModelWeights:
    """Implements ``LiveWeights`` for a rank's model. ``weight_plan`` finds each tensor's place."""

    def __init__(self, scheduler: Any, device: torch.device) -> None:
        self.device = device
        self._scheduler = scheduler
        self._plan: Plan | None = None
        self._spare: Spare | None = None

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

    @property
    def pages(self) -> Pages | None:
        """The memory to which ``parameter_arena`` has moved the parameters, or None."""
        return getattr(self._scheduler.tp_worker.model_runner, "sglrl_pages", None)

    @property
    def stream(self) -> Any:
        """The stream on which the model's kernels run."""
        if self._scheduler.enable_overlap:
            return self._scheduler.forward_stream
        return torch.cuda.current_stream(self.device)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            self.stream.synchronize()

    # --- values -----------------------------------------------------------------------------------

    def named(self, names: list[str]) -> list[TensorValue]:
        """Return copies of live tensors under their Hugging Face names.

        Raises:
            InvalidWeights: the model has no tensor of that name.
            InvalidRequest: this rank holds only a part of the tensor.
        """
        specs = {spec.name: spec for spec in self.describe().tensors}
        self.synchronize()
        with self.reading():
            return [self._value(name, specs.get(name)) for name in names]

    def _value(self, name: str, spec: TensorSpec | None) -> TensorValue:
        if spec is None:
            raise InvalidWeights(f"the model has no tensor {name!r}; see model_metadata()")
        assert self._plan is not None
        copies = self._plan.copies[name]
        if sum(copy.target.numel() for copy in copies) != prod(spec.shape):
            raise InvalidRequest(
                f"{name} is spread over the GPUs of an engine with tp_size > 1; verify_weights "
                "compares such tensors"
            )
        whole = torch.empty(spec.shape, dtype=copies[0].target.dtype)
        for copy in copies:
            part = whole.as_strided(copy.size, copy.stride, copy.offset)
            part.copy_(copy.target.view(copy.size))
        data = bytearray(whole.reshape(-1).view(torch.uint8).numpy())
        dtype = str(whole.dtype).removeprefix("torch.")
        return TensorValue(name, dtype, tuple(spec.shape), data)

    def checksums(self, names: Sequence[str]) -> list[Shard]:
        assert self._plan is not None
        self.synchronize()
        with self.reading():
            return [
                Shard(name, copy.offset, copy.size, copy.stride, checksum(copy.target))
                for name in names or self._plan.copies
                for copy in self._plan.copies.get(name, ())
            ]

    def tensors(self) -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = {}
        seen: set[int] = set()
        for name, tensor in sorted(self._model.state_dict().items()):
            # Tied weights have two names.
            if tensor.data_ptr() not in seen:
                seen.add(tensor.data_ptr())
                tensors[name] = tensor
        return tensors

    def reading(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.pages is None else self.pages.reading()

    # --- new weights ------------------------------------------------------------------------------

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
            # An update sends no data for the gaps between tensors, so copy their live content.
            for begin, end in self._spare.gaps:
                memory[begin:end].copy_(pages.live[begin:end])
        return self._spare.views

    def settle(self) -> None:
        if self.pages is not None:
            self.pages.settle()

    def targets(self, names: Sequence[str]) -> list[torch.Tensor] | None:
        assert self._plan is not None
        targets = [self._plan.straight.get(name) for name in names]
        return None if any(target is None for target in targets) else targets

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

    def make_live(self, bound: Any) -> None:
        """Make new weights live, on the current stream. No step may be launched meanwhile.

        Args:
            bound: the result of ``bind``. None if the weights are in ``spare``.
        """
        if bound is not None:
            self.copy(bound)
            return
        assert self.pages is not None
        self.pages.make_live()

    # --- sleep ------------------------------------------------------------------------------------

    def release_memory(self, *, keep: bool) -> None:
        """Free the memory of the parameters. The engine must be idle, without a running update.

        Args:
            keep: whether to keep all values in the memory of the host. If false, only the values
                that an update of all weights does not send are kept.

        Raises:
            EngineError: the host has too little memory, or ``keep`` is false although the weights
                cannot be updated.
        """
        assert self.pages is not None
        self.synchronize()
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
        gaps, at = [], 0
        for begin, end in [*sorted(written), (memory.nbytes, memory.nbytes)]:
            if begin > at:
                gaps.append((at, begin))
            at = max(at, end)
        return gaps

    def restore_memory(self) -> None:
        """Allocate the memory of the parameters again, and load the values that were kept."""
        assert self.pages is not None
        self.pages.restore()

    def drop_spare(self) -> None:
        """Free the spare memory that is kept for the next update."""
        if self.pages is not None:
            self.pages.drop_spare()
