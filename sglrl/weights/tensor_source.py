"""What a caller gives as weights, as named tensors; and their way into buckets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch

from ..core.manifest import check_manifest, is_computed, total_bytes
from ..errors import InvalidWeights, UsageError
from ..wire.weights import ModelDescription, TensorSpec
from .moe_experts import Part, Whole, parts_of, take_apart

Named = list[tuple[str, torch.Tensor]]

_WRAPPERS: Final = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
"""What torch puts into the names of a module's tensors when it compiles, shards or checkpoints a
part of it."""


class Taken(NamedTuple):
    """Tensors as they will be when what their devices' streams held has been done."""

    named: Named
    ready: list[Any]


def take(weights: Any) -> Taken:
    """What a caller gave, at this moment: call it on the caller's thread, with its streams current.

    Raises what ``named_tensors`` raises.
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
    """(name, tensor) pairs of an ``nn.Module``, a mapping, a TensorDict (nested keys joined by
    dots) or an iterable of pairs; the tensors as they are, parameters among them.

    A module's tied parameters come once, as they do in its checkpoints. What torch wraps around a
    module (``torch.compile``, ``DistributedDataParallel``, FSDP) is not in its tensors' names.

    Raises:
        UsageError: it is none of these.
        InvalidWeights: something in it is not a tensor, or is one without values of its own.
    """
    pairs: Iterable[Any]
    if isinstance(weights, torch.nn.Module):
        weights = _unwrapped(weights)
        pairs = [*weights.named_parameters(), *_persistent_buffers(weights)]
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
    found: Named = []
    for pair in pairs:
        try:
            name, tensor = pair
        except (TypeError, ValueError):
            raise InvalidWeights(f"expected (name, tensor), got {type(pair).__name__}") from None
        if not isinstance(name, str):
            raise InvalidWeights(f"a tensor's name is {name!r}, which is no text")
        if not isinstance(tensor, torch.Tensor):
            raise InvalidWeights(f"{name} is no tensor but {type(tensor).__name__}")
        if tensor.is_meta:
            raise InvalidWeights(f"{name} is on the meta device, so it has no values")
        if tensor.layout is not torch.strided:
            raise InvalidWeights(f"{name} is {tensor.layout}; weights are dense (to_dense())")
        if tensor.is_neg():
            # A view that says that what lies there is to be negated.
            tensor = tensor.resolve_neg()
        for wrapper in _WRAPPERS:
            if wrapper in name:
                name = name.replace(wrapper, "")
        found.append((name, tensor))
    return found


def _unwrapped(module: Any) -> torch.nn.Module:
    while True:
        if isinstance(module, torch.nn.parallel.DistributedDataParallel):
            module = module.module
        elif hasattr(module, "_orig_mod"):
            module = module._orig_mod
        else:
            return module


def _persistent_buffers(module: torch.nn.Module) -> Named:
    """Those that are in its ``state_dict``, without the hooks of that, which may be collectives."""
    return [
        (f"{prefix}.{name}" if prefix else name, buffer)
        for prefix, part in module.named_modules()
        for name, buffer in part._buffers.items()
        if buffer is not None and name not in part._non_persistent_buffers_set
    ]


class Manifest:
    """What of a caller's tensors is sent, and as what. Remembered from one time to the next: a
    trainer sends the same names each time, and looking at a few hundred of them takes a
    millisecond."""

    def __init__(self) -> None:
        self._wanted: ModelDescription | None = None
        self._given: list[Any] = []
        self._sent: list[int] = []
        self._parts: dict[int, list[Part]] = {}
        self._tied: list[tuple[int, int]] = []
        self.specs: list[TensorSpec] = []
        self.total = 0

    def take(self, named: Named, wanted: ModelDescription) -> Named:
        """The tensors to send; after that, ``specs`` are theirs, in the dtypes that the engine
        keeps (the same list while nothing changes), and ``total`` is their size in bytes. Left out
        is what the model keeps no copy of; experts that are one tensor are taken apart.

        Raises:
            InvalidWeights: a tensor does not hold floating-point numbers, or one that is left out
                has another shape than the one that it is tied to.
        """
        given = [(name, tensor.dtype, tensor.shape) for name, tensor in named]
        if wanted is not self._wanted or given != self._given:
            known = {spec.name: spec for spec in wanted.tensors}
            found: dict[int, list[Part]] = {}
            for index, (name, _, shape) in enumerate(given):
                if name not in known and (parts := parts_of(name, shape, known)):
                    found[index] = parts
            sent, specs = _specs(_apart(given, found), wanted)
            # Only now: what is refused leaves what there was.
            self.total = total_bytes(specs)
            self._parts, self._sent, self.specs = found, sent, specs
            at = {name: index for index, (name, _) in enumerate(named)}
            self._tied = [
                (at[name], at[twin])
                for name, twin in wanted.tied.items()
                if name in at and twin in at
            ]
            self._wanted, self._given = wanted, given
        spread = self.spread(named)
        self._check_left_out(spread)
        return _gathered_once([spread[index] for index in self._sent])

    def _check_left_out(self, spread: Named) -> None:
        """``gather`` gathers all DTensors: the others would wait for one that is not sent."""
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
        """What was last taken, by the names of the engine."""
        if not self._parts:
            return named
        found: Named = []
        for index, (name, tensor) in enumerate(named):
            parts = self._parts.get(index)
            if parts is None:
                found.append((name, tensor))
            else:
                found += take_apart(tensor, parts)
        return found

    def untied(self, named: Named) -> list[tuple[str, str]]:
        """Of the tensors last taken: those that are left out, because the engine ties them to
        others, and differ from these; and these."""
        return [
            (named[one][0], named[other][0])
            for one, other in self._tied
            if not _equal(named[one][1], named[other][1])
        ]


def _apart(given: list[Any], parts: Mapping[int, list[Part]]) -> list[Any]:
    """(name, dtype, shape) of ``Manifest.spread``'s tensors."""
    found = []
    for index, (name, dtype, shape) in enumerate(given):
        for part in parts.get(index, [Part(name)]):
            of_one = part.expert is not None
            found.append((part.name, dtype, (part.rows, *shape[2:]) if of_one else shape))
    return found


def check_ties(manifest: Manifest, named: Named) -> None:
    """Raise ``InvalidWeights`` if something would be left out that counts."""
    for name, twin in manifest.untied(named):
        raise InvalidWeights(
            f"{name} differs from {twin}, and the engine has one tensor for both (its model ties "
            "them: tie_word_embeddings)"
        )


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if hasattr(one, "full_tensor") or hasattr(other, "full_tensor"):
        # To look at all of it is a collective of its mesh, which the other ranks do not expect.
        return True
    if one.data_ptr() == other.data_ptr() and one.stride() == other.stride():
        return True
    with torch.no_grad():
        return bool(torch.equal(one.to(other.device, other.dtype), other))


def _specs(given: list[Any], wanted: ModelDescription) -> tuple[list[int], list[TensorSpec]]:
    """Which of them are sent, and their specs."""
    dtypes = {spec.name: spec.dtype for spec in wanted.tensors}
    shapes = {spec.name: spec.shape for spec in wanted.tensors}
    skip = set(wanted.ignored)
    sent: list[int] = []
    specs: list[TensorSpec] = []
    for index, (name, dtype, shape) in enumerate(given):
        if is_computed(name) and name not in dtypes:
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
    """Raise ``InvalidWeights`` unless an update of such tensors (name -> dtype, shape) fits."""
    known = {spec.name: spec for spec in wanted.tensors}
    tensors = [(name, dtype, shape) for name, (dtype, shape) in given.items()]
    parts = {
        index: parts_of(name, shape, known) or [Part(name)]
        for index, (name, _, shape) in enumerate(tensors)
        if name not in known
    }
    _, specs = _specs(_apart(tensors, parts), wanted)
    check_manifest(wanted, specs, partial=True)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A DTensor's full value, which is a collective of its mesh; any other tensor as it is."""
    full = getattr(tensor, "full_tensor", None)
    return full() if full is not None else tensor


def gather(weights: Any) -> None:
    """For the ranks of a trainer that do not send: take part in the gathering of DTensors, in the
    order in which the sending rank asks for them; of tied ones once. Where the sending rank raises
    before it has gathered all of them, this waits until the process group's own time-out."""
    seen = set()
    with torch.no_grad():
        for _, tensor in named_tensors(weights):
            if hasattr(tensor, "full_tensor"):
                place = _place(tensor)
                if place not in seen:
                    seen.add(place)
                    whole(tensor)


def _gathered_once(named: Named) -> Named:
    """Of DTensors that are tied to each other the first one's full value is all the others'."""
    wholes: dict[Any, Whole] = {}
    found: Named = []
    for name, tensor in named:
        if isinstance(tensor, torch.Tensor) and hasattr(tensor, "full_tensor"):
            place = _place(tensor)
            if place in wholes:
                wholes[place].uses += 1
            else:
                wholes[place] = Whole(tensor, 1)
            tensor = wholes[place]
        found.append((name, tensor))
    return found


def _place(tensor: Any) -> tuple[Any, ...]:
    """Where a DTensor's part lies that this rank has. (Not its address, which is 0 for all parts
    that are empty.)"""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.untyped_storage()._cdata, local.storage_offset(), tuple(tensor.shape)
