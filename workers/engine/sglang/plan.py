"""Where each tensor of a model goes that it is sent by its Hugging Face name.

The model's own ``load_weights`` knows (fused and sharded parameters, renamed ones). It is run once
with tensors that have no data, and the copies that it would have made are written down. So a
manifest is checked without touching a weight, and an update is those copies and nothing else.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sglrl.errors import EngineError
from sglrl.messages import ModelDescription, TensorSpec
from sglrl.weights.files import weight_files


@dataclass(frozen=True)
class Copy:
    """Part of a named tensor, by elements, and the live view that it is copied to."""

    target: torch.Tensor
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


class Plan:
    """``copies``: of every tensor that the model keeps, by its Hugging Face name."""

    def __init__(self, copies: dict[str, list[Copy]], description: ModelDescription) -> None:
        self.copies = copies
        self.description = description

        self.straight = dict(self._straight())

    def _straight(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Of the tensors that are copied as they are sent, in one piece, where to."""
        for spec in self.description.tensors:
            copy, *others = self.copies[spec.name]
            target = copy.target
            whole = copy.offset == 0 and target.numel() == prod(spec.shape)
            same_order = target.is_contiguous() and copy.stride == target.stride()
            if whole and same_order and not others:
                yield spec.name, target

    def places(self, memory: torch.Tensor) -> dict[str, tuple[int, int]] | None:
        """The bytes of ``memory``, first and behind the last, that each tensor lies in. None if
        not all of them lie there as they are sent."""
        found = {}
        for name, target in self.straight.items():
            begin = target.data_ptr() - memory.data_ptr()
            end = begin + target.nbytes
            if 0 <= begin <= end <= memory.nbytes:
                found[name] = (begin, end)
        return found if len(found) == len(self.copies) else None


class Spare:
    """Memory that becomes the live one: see ``pages``. ``views``: where it takes each tensor.
    ``gaps``: ranges of bytes between them."""

    def __init__(
        self, memory: torch.Tensor, places: dict[str, tuple[int, int]], specs: list[TensorSpec]
    ) -> None:
        self.views = {}
        for spec in specs:
            begin, end = places[spec.name]
            self.views[spec.name] = (
                memory[begin:end].view(getattr(torch, spec.dtype)).view(spec.shape)
            )
        bounds = [(0, 0), *sorted(places.values()), (memory.nbytes, memory.nbytes)]
        pairs = itertools.pairwise(bounds)
        self.gaps = [(end, begin) for (_, end), (begin, _) in pairs if begin > end]


_PADDING = {torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default}


class _Recorder(TorchDispatchMode):  # type: ignore[misc]
    """Writes down copies into ``live`` storages instead of making them."""

    def __init__(self, live: set[int], names: dict[int, str]) -> None:
        super().__init__()
        self.live = live
        self.names = names
        self.copies: dict[str, list[Copy]] = {}
        self.other: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        if not any(_storage(t) in self.live for t in tensors):
            if func._schema.is_mutable and any(_storage(t) in self.names for t in tensors):
                # What is sent is changed before it is copied (Gemma adds 1 to what its norms have).
                self.other.add(str(func))
            return func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default:
            target, source = args[0], args[1]
            name = self.names.get(_storage(source))
            if name is not None and _storage(target) in self.live:
                copy = Copy(
                    target.detach(),
                    source.storage_offset(),
                    tuple(source.expand(target.shape).shape),
                    source.expand(target.shape).stride(),
                )
                self.copies.setdefault(name, []).append(copy)
                return target
            if source.is_meta:
                # Of something that was computed.
                self.other.add(str(func))
                return target
        if func in _PADDING:
            # The rest of a padded vocabulary, which an update leaves as it is.
            return args[0]
        if (
            not any(r.alias_info is not None for r in func._schema.returns)
            or func._schema.is_mutable
        ):
            # Something is computed from a live weight, or written to it by other means.
            self.other.add(str(func))
        return func(*args, **(kwargs or {}))


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def make_plan(model: Any, named: Iterable[tuple[str, tuple[int, ...]]], skipped: set[str]) -> Plan:
    """Find out where the model's loader puts each tensor. ``skipped``: names that are tied.

    Raises:
        EngineError: the loader does more than copy, so that an update would not be all of it.
    """
    dtype = next(model.parameters()).dtype
    sources = {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in named}
    names = {_storage(tensor): name for name, tensor in sources.items()}
    live = {_storage(t) for t in (*model.parameters(), *model.buffers())}
    recorder = _Recorder(live, names)
    try:
        with torch.no_grad(), recorder:
            model.load_weights(iter(sources.items()))
    except Exception as error:
        raise EngineError(f"the model's loader does not take its own tensors: {error}") from error
    if recorder.other:
        raise EngineError(
            "this model's weights cannot be updated while it runs: its loader does more than copy "
            f"({', '.join(sorted(recorder.other))})"
        )
    tensors = [
        TensorSpec(name, _dtype(recorder.copies[name][0].target), tuple(source.shape))
        for name, source in sources.items()
        if name in recorder.copies
    ]
    ignored = sorted(skipped | (sources.keys() - recorder.copies.keys()))
    return Plan(recorder.copies, ModelDescription(tensors, ignored, _tied(model, tensors, ignored)))


def _tied(model: Any, tensors: list[TensorSpec], ignored: list[str]) -> dict[str, str]:
    """The output layer, if the model has the embedding in its place."""
    if not getattr(getattr(model, "config", None), "tie_word_embeddings", False):
        return {}
    embeddings = [s.name for s in tensors if s.name.endswith(("embed_tokens.weight", "wte.weight"))]
    if "lm_head.weight" not in ignored or len(embeddings) != 1:
        return {}
    return {"lm_head.weight": embeddings[0]}


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def checkpoint_tensors(
    path: str, config: Any
) -> tuple[list[tuple[str, tuple[int, ...]]], set[str]]:
    """Names and shapes of the tensors in a model's checkpoint, and names that are tied to others.

    From the headers of its files; without files (made-up weights) from the architecture in
    transformers, built without memory.
    """
    tied = {"lm_head.weight"} if getattr(config, "tie_word_embeddings", False) else set()
    found: list[tuple[str, tuple[int, ...]]] = []
    folder = Path(path)
    if folder.is_dir() and any(folder.glob("*.safetensors")):
        files = weight_files(folder)
        from safetensors import safe_open

        for file in files:
            with safe_open(file, framework="pt", device="cpu") as opened:
                found += [(n, tuple(opened.get_slice(n).get_shape())) for n in opened.keys()]  # noqa: SIM118
        names = {name for name, _ in found}
        return found, tied - names
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    found = [(name, tuple(p.shape)) for name, p in model.named_parameters()]
    names = {name for name, _ in found}
    return found, (tied | set(model.state_dict())) - names
