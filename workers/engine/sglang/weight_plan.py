"""Find the place in a model of each tensor that arrives under its Hugging Face name.

The model's own ``load_weights`` knows these places, including fused, sharded and renamed
parameters. It runs once, on a copy of the model without data (``stand_in``) and with tensors
without data, while a recorder notes the copies that the loader makes. So the live weights stay
unchanged, and an update consists of exactly these copies.
"""

from __future__ import annotations

import contextlib
import itertools
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from sglrl.errors import EngineError
from sglrl.weights.moe_experts import EXPERT_NAMES, names_apart
from sglrl.weights.safetensors_files import weight_files
from sglrl.wire.weights import ModelDescription, TensorSpec

from .stand_in import StandIn, storage_id


@dataclass(frozen=True)
class Copy:
    """A part of a named tensor, and the live view into which it is copied.

    Attributes:
        target: the live view.
        offset, size, stride: the part of the named tensor, counted in elements.
    """

    target: torch.Tensor
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


class Plan:
    """The copies that make up an update.

    Attributes:
        copies: the copies of every tensor that the model keeps, by Hugging Face name.
        description: the tensors of an update.
        straight: live views of the tensors that are copied whole, in the layout in which they
            arrive.
    """

    def __init__(self, copies: dict[str, list[Copy]], description: ModelDescription) -> None:
        self.copies = copies
        self.description = description

        self.straight = dict(self._straight())

    def _straight(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the target of each tensor that is copied whole, in the layout of its arrival."""
        for spec in self.description.tensors:
            copy, *others = self.copies[spec.name]
            target = copy.target
            whole = copy.offset == 0 and target.numel() == prod(spec.shape)
            same_order = target.is_contiguous() and copy.stride == target.stride()
            if whole and same_order and not others:
                yield spec.name, target

    def places(self, memory: torch.Tensor) -> dict[str, tuple[int, int]] | None:
        """Return each tensor's byte range in ``memory``: its first byte, and the byte after it.

        Return None unless all tensors lie in ``memory`` in the layout in which they arrive.
        """
        ranges = {}
        for name, target in self.straight.items():
            begin = target.data_ptr() - memory.data_ptr()
            end = begin + target.nbytes
            if 0 <= begin <= end <= memory.nbytes:
                ranges[name] = (begin, end)
        return ranges if len(ranges) == len(self.copies) else None


class Spare:
    """Memory that can become the live memory (see ``double_buffer``).

    Attributes:
        views: the place in this memory that receives each tensor.
        gaps: the byte ranges that no tensor uses.
    """

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


class _Sent(torch.Tensor):  # type: ignore[misc]
    """A tensor of the checkpoint, without data.

    The recorder works in one thread only. Use of the tensor in another thread is an error, because
    the plan would miss the copy.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} ran in a thread of the loader's own, which is not recorded")


class _Recorder(TorchDispatchMode):  # type: ignore[misc]
    """Records which parts of the tensors in ``names`` are copied to which parts of the stand-in.

    The recorder runs operators on the stand-in and on tensors that the loader has created. It
    refuses changes to all other tensors, which the loader may have obtained from elsewhere.
    """

    def __init__(self, stand_in: StandIn, names: dict[int, str], dtype: torch.dtype) -> None:
        super().__init__()
        self.stand_in = stand_in
        self.live = stand_in.storages
        self.names = names
        self.dtype = dtype
        self.copies: dict[str, list[Copy]] = {}
        self.padded: list[torch.Tensor] = []
        self.other: set[str] = set()
        self._made: dict[int, Any] = {}
        """Storages that the loader has created, by id."""
        self._foreign: dict[int, Any] = {}
        """Storages that the loader has obtained from elsewhere, by id."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [a for a in tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor)]
        storages = {storage_id(t): t for t in tensors}
        mutable = func._schema.is_mutable
        known = self.live | self.names.keys() | self._made.keys()
        foreign = {id_: t.untyped_storage() for id_, t in storages.items() if id_ not in known}
        self._foreign |= foreign
        if foreign and (mutable or func.namespace not in ("aten", "prims")):
            self.other.add(str(func))
            raise RuntimeError(f"{func} would change a tensor that is not the loader's own")
        if not storages.keys() & self.live:
            if mutable and storages.keys() & self.names.keys():
                # The loader changes a tensor before the copy, as Gemma's adds 1 to norm weights.
                self.other.add(str(func))
            return self._run(func, args, kwargs)
        if func is torch.ops.aten.copy_.default and storage_id(args[0]) in self.live:
            target, source = args[0], args[1]
            name = self.names.get(storage_id(source))
            if name is None or source.dtype != self.dtype:
                # The source was computed, or its bytes were reinterpreted as another dtype.
                self.other.add(str(func))
                return target
            copy = Copy(
                self.stand_in.live(target),
                source.storage_offset(),
                tuple(target.shape),
                self._run(source.expand, (target.shape,), {}).stride(),
            )
            self.copies.setdefault(name, []).append(copy)
            return target
        if func in _PADDING:
            # This pads the vocabulary. An update does not change the padding.
            self.padded.append(self.stand_in.live(args[0]))
            return args[0]
        if mutable or not any(r.alias_info is not None for r in func._schema.returns):
            # The loader computes from a live weight, or writes to a live weight without a copy.
            self.other.add(str(func))
        return self._run(func, args, kwargs)

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        with torch._C._DisableTorchDispatch():
            result = func(*args, **kwargs)
        return tree_map_only(torch.Tensor, self._known, result)

    def _known(self, tensor: torch.Tensor) -> torch.Tensor:
        id_ = storage_id(tensor)
        if id_ in self.names:
            return _sent(tensor)
        if id_ not in self.live and id_ not in self._foreign:
            self._made[id_] = tensor.untyped_storage()
        return tensor


def _sent(tensor: torch.Tensor) -> torch.Tensor:
    make: Any = torch.Tensor._make_subclass
    return make(_Sent, tensor)


Names = list[tuple[str, tuple[int, ...]]]
"""The names and shapes of a checkpoint's tensors."""


def plan_of(model: Any, folder: Path, config: Any) -> Plan:
    """Make the plan for a model that was loaded from ``folder``.

    Args:
        config: the configuration of the model from transformers.

    Raises:
        EngineError: the model cannot be updated, or the names of its tensors are not known.
    """
    checkpoint = checkpoint_tensors(folder, config)
    if checkpoint is not None:
        return make_plan(model, *checkpoint)
    # There is no checkpoint, for example because the weights are random. The names are then a
    # guess, which must cover the whole model.
    wrong = ""
    for named, tied in _guesses(config):
        try:
            return make_plan(model, named, tied, all_of_it=True)
        except EngineError as error:
            wrong = wrong or str(error)
    raise EngineError(
        f"there are no safetensors files in {folder}, and what a checkpoint of this model calls "
        f"its tensors is not known; to update it, start it from a folder that has some ({wrong})"
    )


def make_plan(
    model: Any,
    named: Iterable[tuple[str, tuple[int, ...]]],
    skipped: set[str],
    *,
    all_of_it: bool = False,
) -> Plan:
    """Find out where the model's loader puts each tensor.

    Args:
        named: names and shapes of the tensors.
        skipped: names of tensors that are tied to other tensors.
        all_of_it: whether the named tensors must cover the whole model.

    Raises:
        EngineError: the loader does more than copy, so the copies would not be the whole update, or
            the named tensors do not cover the model although ``all_of_it`` is set.
    """
    dtype = next(model.parameters()).dtype
    sources = {name: _sent(torch.empty(shape, dtype=dtype, device="meta")) for name, shape in named}
    names = {storage_id(tensor): name for name, tensor in sources.items()}
    stand_in = StandIn(model)
    recorder = _Recorder(stand_in, names, dtype)
    try:
        with torch.no_grad(), recorder:
            stand_in.model.load_weights(iter(sources.items()))
    except Exception as error:
        if not recorder.other:
            raise EngineError(f"the model's loader rejects its own tensors: {error}") from error
    if other := recorder.other | set(stand_in.changes()):
        raise EngineError(
            "this model's weights cannot be updated while it runs: its loader does more than copy "
            f"({', '.join(sorted(other))})"
        )
    if all_of_it and (left := _left_out(model, recorder)):
        raise EngineError(f"no given tensor provides the model's {', '.join(left[:4])}")
    tensors = [
        TensorSpec(name, _dtype(recorder.copies[name][0].target), tuple(source.shape))
        for name, source in sources.items()
        if name in recorder.copies
    ]
    ignored = sorted(skipped | (sources.keys() - recorder.copies.keys()))
    return Plan(recorder.copies, ModelDescription(tensors, ignored, _tied(model, tensors, ignored)))


def _left_out(model: Any, recorder: _Recorder) -> list[str]:
    """Return the names of parameters that the copies do not cover completely."""
    reached = [copy.target for copies in recorder.copies.values() for copy in copies]
    reached += recorder.padded
    bytes_at = {(t.data_ptr(), t.shape, t.stride()): t.nbytes for t in reached}
    at = sorted((place[0], nbytes) for place, nbytes in bytes_at.items())
    left = []
    for name, parameter in model.named_parameters():
        begin = parameter.data_ptr()
        first, last = (bisect_left(at, (where,)) for where in (begin, begin + parameter.nbytes))
        if sum(nbytes for _, nbytes in at[first:last]) < parameter.nbytes:
            left.append(name)
    return left


def _tied(model: Any, tensors: list[TensorSpec], ignored: list[str]) -> dict[str, str]:
    """Map the output layer to the embedding, if the model ties the two."""
    if not getattr(getattr(model, "config", None), "tie_word_embeddings", False):
        return {}
    embeddings = [s.name for s in tensors if s.name.endswith(("embed_tokens.weight", "wte.weight"))]
    if "lm_head.weight" not in ignored or len(embeddings) != 1:
        return {}
    return {"lm_head.weight": embeddings[0]}


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def checkpoint_folder(model: str, revision: str | None, cache: str | None) -> Path:
    """Return the folder with the files of a model that SGLang has loaded.

    The model is a folder, or a name on the hub. SGLang has already downloaded the files of a hub
    model to the cache.
    """
    if not Path(model).is_dir():
        from huggingface_hub import snapshot_download

        # A model with random weights was never downloaded.
        with contextlib.suppress(OSError, ValueError):
            return Path(
                snapshot_download(model, revision=revision, cache_dir=cache, local_files_only=True)
            )
    return Path(model)


def checkpoint_tensors(folder: Path, config: Any) -> tuple[Names, set[str]] | None:
    """Read the names and shapes of a checkpoint's tensors from the headers of its files.

    Returns:
        The names and shapes, and the names that are tied to other tensors. None if the folder has
        no safetensors files.
    """
    if not folder.is_dir() or not any(folder.glob("*.safetensors")):
        return None
    from safetensors import safe_open

    named: Names = []
    for file in weight_files(folder):
        with safe_open(file, framework="pt", device="cpu") as opened:
            named += [(n, tuple(opened.get_slice(n).get_shape())) for n in opened.keys()]  # noqa: SIM118
    return named, _tied_names(config) - {name for name, _ in named}


def _tied_names(config: Any) -> set[str]:
    return {"lm_head.weight"} if getattr(config, "tie_word_embeddings", False) else set()


def _guesses(config: Any) -> Iterator[tuple[Names, set[str]]]:
    """Yield possible names and shapes of a checkpoint's tensors.

    The first guess is the names in the module of transformers, built without memory. This module
    may keep all experts of a layer in one tensor. The next guesses then name one tensor for each
    expert, by each known naming scheme.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    tied = _tied_names(config)
    named = [
        (name, tuple(tensor.shape))
        for name, tensor in model.state_dict().items()
        if tensor.is_floating_point() and name not in tied
    ]
    yield named, tied
    for names in EXPERT_NAMES:
        yield names_apart(named, names), tied
