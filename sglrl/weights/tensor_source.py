"""Convert a caller's weights to named tensors, and select the tensors to send."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch

from ..core.manifest import WITH_ADAPTERS, check_manifest, is_computed, total_bytes
from ..errors import InvalidWeights, UsageError
from ..wire.weights import ModelDescription, TensorSpec
from .moe_experts import Part, Whole, parts_of, take_apart

Named = list[tuple[str, torch.Tensor]]

_WRAPPERS: Final = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
"""Parts that torch adds to the names of tensors when it compiles, shards or checkpoints a part of a
module."""


class Taken(NamedTuple):
    """A caller's tensors, and the CUDA events to wait for before the tensors are read.

    Attributes:
        named: the tensors by name.
        ready: one event for each CUDA device, recorded on the caller's current stream.
    """

    named: Named
    ready: list[Any]


def take(weights: Any) -> Taken:
    """Record the state of a caller's weights at this moment.

    Call this on the caller's thread, with the caller's CUDA streams current. This function raises
    the same errors as ``named_tensors``.
    """
    if isinstance(weights, Taken):
        return weights
    named = named_tensors(weights)
    ready = []
    for device in {t.device for _, t in named}:
        if device.type != "cuda":
            continue
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        ready.append(event)
    return Taken(named, ready)


def named_tensors(weights: Any) -> Named:
    """Return the (name, tensor) pairs of a caller's weights.

    The tensors are not copied, and may be parameters. A module's tied parameters appear under each
    of their names. The names do not contain the prefixes of torch's wrappers around a module
    (``torch.compile``, ``DistributedDataParallel``, FSDP).

    Args:
        weights: an ``nn.Module``, a mapping, a TensorDict (nested keys are joined by dots) or an
            iterable of pairs.

    Raises:
        UsageError: ``weights`` has another type.
        InvalidWeights: an item is not a (name, tensor) pair, its tensor is on the meta device or
            not dense, or the module has adapters of PEFT.
    """
    pairs: Iterable[Any]
    if isinstance(weights, torch.nn.Module):
        weights = unwrapped(weights)
        _check_no_adapter(weights)
        named = weights.named_parameters(remove_duplicate=False)
        pairs = [*named, *_persistent_buffers(weights)]
    elif hasattr(weights, "flatten_keys") and hasattr(weights, "batch_size"):
        pairs = weights.flatten_keys(".").items()
    elif isinstance(weights, Mapping):
        pairs = weights.items()
    elif isinstance(weights, (str, bytes)) or not isinstance(weights, Iterable):
        raise UsageError(
            "weights are a torch.nn.Module, a TensorDict, a mapping of names to tensors or an "
            f"iterable of (name, tensor), not {type(weights).__name__}; for files use "
            "update_weights_from_disk"
        )
    else:
        pairs = weights
    checked: Named = []
    for pair in pairs:
        try:
            name, tensor = pair
        except (TypeError, ValueError):
            raise InvalidWeights(f"expected (name, tensor), got {type(pair).__name__}") from None
        if not isinstance(name, str):
            raise InvalidWeights(f"a tensor's name is {name!r}, which is not text")
        if not isinstance(tensor, torch.Tensor):
            raise InvalidWeights(f"{name} is not a tensor but {type(tensor).__name__}")
        if tensor.is_meta:
            raise InvalidWeights(f"{name} is on the meta device, so it has no values")
        if tensor.layout is not torch.strided:
            raise InvalidWeights(f"{name} is {tensor.layout}; weights are dense (to_dense())")
        if tensor.is_neg():
            # The tensor is a lazily negated view, whose memory holds the values before negation.
            tensor = tensor.resolve_neg()
        checked.append((name, tensor))
    return own_names(checked)


def _check_no_adapter(module: torch.nn.Module) -> None:
    """Raise ``InvalidWeights`` for a ``PeftModel``, because the engine lacks its tensor names.

    A merged model, which ``merge_and_unload`` returns, is not a ``PeftModel`` any more.
    """
    wraps = any(
        hasattr(part, "adapter_layer_names") and hasattr(part, "active_adapters")
        for part in module.modules()
    )
    # Some kinds of adapters wrap no module.
    if wraps or (hasattr(module, "peft_config") and hasattr(module, "get_base_model")):
        raise InvalidWeights(f"the weights do not fit the model: {WITH_ADAPTERS}")


def own_names(named: Iterable[tuple[str, torch.Tensor]]) -> Named:
    """Remove the parts of tensor names that torch adds when it wraps a part of a module."""
    renamed: Named = []
    for name, tensor in named:
        for wrapper in _WRAPPERS:
            if wrapper in name:
                name = name.replace(wrapper, "")
        renamed.append((name, tensor))
    return renamed


def unwrapped(module: Any) -> Any:
    """Return the module inside ``torch.compile``, ``DistributedDataParallel`` and similar wrappers.

    Such a wrapper has one child, "_orig_mod" or "module", and no parameters itself. No checkpoint
    has names with these prefixes.
    """
    while isinstance(module, torch.nn.Module):
        children = [*module._modules]
        if children not in (["module"], ["_orig_mod"]) or module._parameters:
            break
        module = module._modules[children[0]]
    return module


def _persistent_buffers(module: torch.nn.Module) -> Named:
    """Return the buffers that belong to the module's ``state_dict``.

    ``state_dict`` itself is not called, because its hooks may run collectives.
    """
    return [
        (f"{prefix}.{name}" if prefix else name, buffer)
        for prefix, part in module.named_modules()
        for name, buffer in part._buffers.items()
        if buffer is not None and name not in part._non_persistent_buffers_set
    ]


class Manifest:
    """Selects the tensors that are sent, with their names and dtypes.

    The selection is kept for the next update, because a trainer sends the same names each time, and
    selecting takes a millisecond for a few hundred names.

    Attributes:
        specs: the specs of the tensors that the last ``take`` selected.
        total: the total size of these tensors in bytes.
    """

    def __init__(self) -> None:
        self._wanted: ModelDescription | None = None
        self._given: list[Any] = []
        self._sent: list[int] = []
        self._parts: dict[int, list[Part]] = {}
        self._tied: list[tuple[int, int]] = []
        self._alone: list[tuple[int, str]] = []
        self.specs: list[TensorSpec] = []
        self.total = 0

    def take(self, named: Named, wanted: ModelDescription) -> Named:
        """Return the tensors to send, and set ``specs`` and ``total``.

        ``specs`` has the dtypes that the engine keeps. It stays the same list object while the
        names, dtypes and shapes do not change. Tensors that the model does not keep are left out. A
        tensor that holds several experts is split. If the model knows only one of a tensor's names,
        the other names are left out.

        Raises:
            InvalidWeights: there are no tensors, a tensor does not hold floating-point numbers, a
                tensor that is left out has another shape than the tensor to which it is tied, or
                other ranks would gather a tensor that is left out.
        """
        if not named:
            raise InvalidWeights("the weights do not fit the model: no tensors are given")
        unused = _second_names(named, wanted)
        given = [(name, tensor.dtype, tensor.shape, name in unused) for name, tensor in named]
        if wanted is not self._wanted or given != self._given:
            known = {spec.name: spec for spec in wanted.tensors}
            parts_by_index: dict[int, list[Part]] = {}
            for index, (name, _, shape, _) in enumerate(given):
                if name not in known and (parts := parts_of(name, shape, known)):
                    parts_by_index[index] = parts
            sent, specs = _specs(_apart(given, parts_by_index), wanted, unused)
            # Set the results after all checks, so that an error keeps the previous selection.
            self.total = total_bytes(specs)
            self._parts, self._sent, self.specs = parts_by_index, sent, specs
            at = {name: index for index, (name, _) in enumerate(named)}
            self._tied = [
                (at[name], at[twin])
                for name, twin in wanted.tied.items()
                if name in at and twin in at
            ]
            self._alone = [
                (at[name], twin)
                for name, twin in wanted.tied.items()
                if name in at and name not in known and twin not in at
            ]
            self._wanted, self._given = wanted, given
        spread = self.spread(named)
        self._check_left_out(spread)
        return _gathered_once([spread[index] for index in self._sent])

    def _check_left_out(self, spread: Named) -> None:
        """Raise ``InvalidWeights`` if a DTensor of several ranks would be left out.

        ``gather`` gathers all DTensors, so the other ranks would wait for a DTensor that is not
        sent. A left-out DTensor that shares the memory of a sent tensor is allowed.
        """
        if len(self._sent) == len(spread):
            return
        sent = set(self._sent)
        left = {
            name: _place(tensor)
            for index, (name, tensor) in enumerate(spread)
            if index not in sent and getattr(tensor, "device_mesh", None) is not None
            if tensor.device_mesh.size() > 1
        }
        if not left:
            return
        places = {_place(spread[i][1]) for i in sent if isinstance(spread[i][1], torch.Tensor)}
        if wrong := [name for name, place in left.items() if place not in places]:
            raise InvalidWeights(
                f"the engine keeps no copy of {', '.join(wrong)}, which other ranks would gather; "
                "leave such tensors out of what is given, here and to gather()"
            )

    def spread(self, named: Named) -> Named:
        """Return the tensors under the engine's names, split as in the last ``take``."""
        if not self._parts:
            return named
        tensors: Named = []
        for index, (name, tensor) in enumerate(named):
            parts = self._parts.get(index)
            if parts is None:
                tensors.append((name, tensor))
            else:
                tensors += take_apart(tensor, parts)
        return tensors

    def untied(self, named: Named) -> list[tuple[str, str]]:
        """Return the name pairs of tied tensors with different values, from the last ``take``.

        The first name of each pair is not sent, because the engine ties it to the second name.
        """
        return [
            (named[one][0], named[other][0])
            for one, other in self._tied
            if not _equal(named[one][1], named[other][1])
        ]

    def alone(self, named: Named) -> list[tuple[str, str, torch.Tensor]]:
        """Return the left-out tensors of the last ``take`` whose tied tensors were not given.

        Returns:
            For each tensor: its name, the name to which the engine ties it, and the tensor.
        """
        return [(named[index][0], twin, named[index][1]) for index, twin in self._alone]


def _second_names(named: Named, wanted: ModelDescription) -> set[str]:
    """Return unknown names of tensors that are also given under a known name."""
    if len({id(tensor) for _, tensor in named}) == len(named):
        return set()
    known = {spec.name for spec in wanted.tensors}
    sent = {id(tensor) for name, tensor in named if name in known}
    return {name for name, tensor in named if name not in known and id(tensor) in sent}


def _apart(given: list[Any], parts: Mapping[int, list[Part]]) -> list[Any]:
    """Return the (name, dtype, shape) of the tensors that ``Manifest.spread`` returns."""
    apart = []
    for index, (name, dtype, shape, *_) in enumerate(given):
        for part in parts.get(index, [Part(name)]):
            of_one = part.expert is not None
            apart.append((part.name, dtype, (part.rows, *shape[2:]) if of_one else shape))
    return apart


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if any(tensor.device_mesh.size() > 1 for tensor in (one, other) if _is_sharded(tensor)):
        # Reading the full value is a collective of the mesh, which the other ranks do not expect.
        # ``_check_left_out`` has already checked that both are the same tensor.
        return True
    one, other = whole(one), whole(other)
    if one.data_ptr() == other.data_ptr() and one.stride() == other.stride():
        return True
    with torch.no_grad():
        return bool(torch.equal(one.to(other.device, other.dtype), other))


def _is_sharded(tensor: Any) -> bool:
    return getattr(tensor, "device_mesh", None) is not None


def _specs(
    given: list[Any], wanted: ModelDescription, unused: Collection[str] = ()
) -> tuple[list[int], list[TensorSpec]]:
    """Return the indices of the tensors to send, and their specs.

    Args:
        unused: names of tensors to leave out.
    """
    dtypes = {spec.name: spec.dtype for spec in wanted.tensors}
    shapes = {spec.name: spec.shape for spec in wanted.tensors}
    skip = set(wanted.ignored)
    sent: list[int] = []
    specs: list[TensorSpec] = []
    for index, (name, dtype, shape) in enumerate(given):
        if name in unused or (is_computed(name) and name not in dtypes):
            continue
        left_out = name in skip and name not in dtypes
        twin = wanted.tied.get(name)
        if left_out and twin is None:
            continue
        if not dtype.is_floating_point:
            raise InvalidWeights(f"{name} holds {dtype}; weights are floating-point numbers")
        if left_out and twin is not None:
            if tuple(shape) != tuple(shapes[twin]):
                raise InvalidWeights(
                    f"{name} has shape {list(shape)}, and {twin}, to which the engine ties it, "
                    f"{list(shapes[twin])}"
                )
            continue
        kept = dtypes.get(name) or str(dtype).removeprefix("torch.")
        sent.append(index)
        specs.append(TensorSpec(name, kept, tuple(shape)))
    return sent, specs


def check_metadata(
    given: Mapping[str, tuple[torch.dtype, Sequence[int]]], wanted: ModelDescription
) -> None:
    """Raise ``InvalidWeights`` unless tensors of these names, dtypes and shapes fit the model."""
    known = {spec.name: spec for spec in wanted.tensors}
    tensors = [(name, dtype, shape) for name, (dtype, shape) in given.items()]
    parts = {
        index: parts_of(name, shape, known) or [Part(name)]
        for index, (name, _, shape) in enumerate(tensors)
        if name not in known
    }
    _, specs = _specs(_apart(tensors, parts), wanted)
    if specs or not given:
        check_manifest(wanted, specs, partial=True)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a DTensor's full value, or any other tensor unchanged.

    Reading the full value of a DTensor is a collective of its mesh.
    """
    full = getattr(tensor, "full_tensor", None)
    return full() if full is not None else tensor


def gather(weights: Any) -> None:
    """Take part in gathering DTensors. Call this on each rank of a trainer that does not send.

    DTensors are gathered in the same order as on the sending rank, and tied DTensors only once. If
    the sending rank raises an error before it has gathered all DTensors, this function waits until
    the time limit of the process group.
    """
    seen = set()
    with torch.no_grad():
        for _, tensor in named_tensors(weights):
            if hasattr(tensor, "full_tensor"):
                place = _place(tensor)
                if place not in seen:
                    seen.add(place)
                    whole(tensor)


def _gathered_once(named: Named) -> Named:
    """Replace tied DTensors by one ``Whole``, so that each full value is gathered only once."""
    wholes: dict[Any, Whole] = {}
    gathered: Named = []
    for name, tensor in named:
        if isinstance(tensor, torch.Tensor) and hasattr(tensor, "full_tensor"):
            place = _place(tensor)
            if place in wholes:
                wholes[place].uses += 1
            else:
                wholes[place] = Whole(tensor, 1)
            tensor = wholes[place]
        gathered.append((name, tensor))
    return gathered


def _place(tensor: Any) -> tuple[Any, ...]:
    """Return a key for the memory of this rank's part of a DTensor.

    The address cannot be the key, because it is 0 for every empty part.
    """
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.untyped_storage()._cdata, local.storage_offset(), tuple(tensor.shape)
