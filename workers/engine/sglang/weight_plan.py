"""Where each tensor of a model goes that it is sent by its Hugging Face name.

The model's own ``load_weights`` knows (fused and sharded parameters, renamed ones). It is run once
on a copy of the model without data (``stand_in``), with tensors that have none either, and the
copies that it makes are recorded. So the live weights are never touched, and an update is those
copies and nothing else.
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


class _Sent(torch.Tensor):  # type: ignore[misc]
    """A tensor of the checkpoint, without data. A recorder belongs to one thread, so a use of the
    tensor in another thread is an error: the copy would be missing in the plan."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} ran in a thread of the loader's own, which is not recorded")


class _Recorder(TorchDispatchMode):  # type: ignore[misc]
    """Records which parts of the tensors in ``names`` are copied to which parts of the stand-in.

    It runs operators on the stand-in and on tensors that the loader has made, and no others. So a
    tensor that the loader gets from elsewhere is not changed either.
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
        """Storages that the loader has made, by id."""
        self._foreign: dict[int, Any] = {}
        """Storages that the loader has got from elsewhere, by id."""

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
                # What is sent is changed before it is copied (Gemma adds 1 to what its norms have).
                self.other.add(str(func))
            return self._run(func, args, kwargs)
        if func is torch.ops.aten.copy_.default and storage_id(args[0]) in self.live:
            target, source = args[0], args[1]
            name = self.names.get(storage_id(source))
            if name is None or source.dtype != self.dtype:
                # Of something that was computed, or of the bytes as numbers of another type.
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
            # The rest of a padded vocabulary, which an update leaves as it is.
            self.padded.append(self.stand_in.live(args[0]))
            return args[0]
        if mutable or not any(r.alias_info is not None for r in func._schema.returns):
            # Something is computed from a live weight, or written to it by other means.
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
"""And shapes, of a checkpoint's tensors."""


def plan_of(model: Any, folder: Path, config: Any) -> Plan:
    """For a model that was loaded from ``folder``, ``config`` being transformers'.

    Raises:
        EngineError: it cannot be updated, or it is not known what its tensors are called.
    """
    found = checkpoint_tensors(folder, config)
    if found is not None:
        return make_plan(model, *found)
    # The weights are made up, say. Nobody says what a checkpoint would have; but it would have all.
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
    """Find out where the model's loader puts each tensor. ``skipped``: names that are tied.

    Raises:
        EngineError: the loader does more than copy, so that an update would not be all of it; or
            (``all_of_it``) what is named is not.
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
            raise EngineError(
                f"the model's loader does not take its own tensors: {error}"
            ) from error
    if other := recorder.other | set(stand_in.changes()):
        raise EngineError(
            "this model's weights cannot be updated while it runs: its loader does more than copy "
            f"({', '.join(sorted(other))})"
        )
    if all_of_it and (left := _left_out(model, recorder)):
        raise EngineError(f"nothing of what is named is its {', '.join(left[:4])}")
    tensors = [
        TensorSpec(name, _dtype(recorder.copies[name][0].target), tuple(source.shape))
        for name, source in sources.items()
        if name in recorder.copies
    ]
    ignored = sorted(skipped | (sources.keys() - recorder.copies.keys()))
    return Plan(recorder.copies, ModelDescription(tensors, ignored, _tied(model, tensors, ignored)))


def _left_out(model: Any, recorder: _Recorder) -> list[str]:
    """Parameters that no copy reaches, or not all of them."""
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
    """The output layer, if the model has the embedding in its place."""
    if not getattr(getattr(model, "config", None), "tie_word_embeddings", False):
        return {}
    embeddings = [s.name for s in tensors if s.name.endswith(("embed_tokens.weight", "wte.weight"))]
    if "lm_head.weight" not in ignored or len(embeddings) != 1:
        return {}
    return {"lm_head.weight": embeddings[0]}


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def checkpoint_folder(model: str, revision: str | None, cache: str | None) -> Path:
    """Where the files of a model lie that SGLang has loaded: a folder, or a name on the hub, whose
    files are in the cache by now."""
    if not Path(model).is_dir():
        from huggingface_hub import snapshot_download

        # What is made up was never there.
        with contextlib.suppress(OSError, ValueError):
            return Path(
                snapshot_download(model, revision=revision, cache_dir=cache, local_files_only=True)
            )
    return Path(model)


def checkpoint_tensors(folder: Path, config: Any) -> tuple[Names, set[str]] | None:
    """Names and shapes of the tensors in a model's checkpoint, from the headers of its files, and
    names that are tied to others. None: it has none."""
    if not folder.is_dir() or not any(folder.glob("*.safetensors")):
        return None
    from safetensors import safe_open

    found: Names = []
    for file in weight_files(folder):
        with safe_open(file, framework="pt", device="cpu") as opened:
            found += [(n, tuple(opened.get_slice(n).get_shape())) for n in opened.keys()]  # noqa: SIM118
    return found, _tied_names(config) - {name for name, _ in found}


def _tied_names(config: Any) -> set[str]:
    return {"lm_head.weight"} if getattr(config, "tie_word_embeddings", False) else set()


def _guesses(config: Any) -> Iterator[tuple[Names, set[str]]]:
    """What a checkpoint may have: what the module of transformers has, built without memory; and
    where that has all experts of a layer in one tensor, one for each, whatever they are called."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    tied = _tied_names(config)
    found = [
        (name, tuple(tensor.shape))
        for name, tensor in model.state_dict().items()
        if tensor.is_floating_point() and name not in tied
    ]
    yield found, tied
    for names in EXPERT_NAMES:
        yield names_apart(found, names), tied
