"""What an update carries, whether it fits the engine, and how it is cut into buckets.

Sender and workers compute the same buckets from the same manifest, so nothing but the manifest and
``bucket_bytes`` need be agreed on. A tensor is never split: one larger than a bucket is a bucket
of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Final, NamedTuple

from ..errors import InvalidWeights
from ..wire.weights import ModelDescription, TensorSpec

ALIGNMENT: Final = 256
"""Bytes. Tensors begin at multiples of it, as those that CUDA's allocator gives out do."""

FLOAT_BYTES: Final = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}
"""The dtypes that weights may have."""

PIECE_BYTES: Final = 8 << 20

_SHOWN = 8


def tensor_bytes(spec: TensorSpec) -> int:
    """Size of the tensor. Raises ``InvalidWeights`` for a dtype that weights cannot have."""
    size = FLOAT_BYTES.get(spec.dtype)
    if size is None:
        raise InvalidWeights(
            f"{spec.name} is {spec.dtype}; weights are one of {', '.join(FLOAT_BYTES)}"
        )
    return prod(spec.shape) * size


def total_bytes(specs: Iterable[TensorSpec]) -> int:
    return sum(map(tensor_bytes, specs))


def is_computed(name: str) -> bool:
    """Whether a tensor of this name follows from a model's configuration: modules have it as a
    buffer, and checkpoints do not."""
    return ".rotary_emb." in name


def merged(descriptions: Sequence[ModelDescription]) -> ModelDescription:
    """What the ranks of one engine take together: each says for itself which tensors it takes, and
    which it leaves out, such as the experts that other ranks have."""
    taken = {spec.name: spec for one in descriptions for spec in one.tensors}
    ignored = {name for one in descriptions for name in one.ignored} - taken.keys()
    tied = {name: twin for one in descriptions for name, twin in one.tied.items()}
    return ModelDescription([*taken.values()], sorted(ignored), tied)


def check_manifest(
    wanted: ModelDescription, given: Sequence[TensorSpec], *, partial: bool = False
) -> None:
    """Raise ``InvalidWeights`` unless ``given`` fits the model. It says all that is wrong; of what
    is wrong with many tensors, it names the first.

    Args:
        partial: the tensors left out keep their values.
    """
    known = {spec.name: spec for spec in wanted.tensors}
    wrong: list[str] = []
    seen: set[str] = set()
    unknown = []
    for spec in given:
        if spec.name in seen:
            wrong.append(f"{spec.name} is given twice")
        seen.add(spec.name)
        expected = known.get(spec.name)
        if expected is None:
            unknown.append(spec.name)
        elif expected.shape != spec.shape:
            wrong.append(
                f"{spec.name} has shape {list(spec.shape)}, the model's is {list(expected.shape)}"
            )
        elif expected.dtype != spec.dtype:
            wrong.append(f"{spec.name} is {spec.dtype}, the model's is {expected.dtype}")
    problems = [] if given else ["no tensors are given"]
    if unknown:
        problems.append(f"unknown: {_some(unknown)}")
    missing = [] if partial else [name for name in known if name not in seen]
    if missing:
        problems.append(f"missing: {_some(missing)} (partial=True would leave them as they are)")
    problems += wrong[:_SHOWN]
    if len(wrong) > _SHOWN:
        problems.append(f"and {len(wrong) - _SHOWN} more that do not fit")
    if problems:
        raise InvalidWeights("the weights do not fit the model: " + "; ".join(problems))


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


class Place(NamedTuple):
    """Where a tensor lies: bytes ``offset`` to ``offset + nbytes`` of bucket ``bucket``."""

    bucket: int
    offset: int
    nbytes: int


class Layout(NamedTuple):
    """places: of the manifest's tensors, in its order. sizes: bytes of every bucket. ring_slot: of
    the largest bucket that is no single large tensor."""

    places: list[Place]
    sizes: list[int]
    ring_slot: int

    @property
    def total(self) -> int:
        return sum(self.sizes)


def lay_out(specs: Sequence[TensorSpec], bucket_bytes: int) -> Layout:
    """Fill buckets with the tensors, in order. Raises ``InvalidWeights`` as ``tensor_bytes``."""
    places: list[Place] = []
    sizes: list[int] = []
    for spec in specs:
        nbytes = tensor_bytes(spec)
        # Also an empty tensor takes some: there are no empty buckets.
        space = -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT
        if not sizes or sizes[-1] + space > bucket_bytes:
            sizes.append(0)
        places.append(Place(len(sizes) - 1, sizes[-1], nbytes))
        sizes[-1] += space
    fitting = [size for size in sizes if size <= bucket_bytes]
    return Layout(places, sizes, max(fitting, default=max(sizes, default=0)))


def in_pieces(layout: Layout, indices: Sequence[int]) -> bool:
    """Whether a bucket of these tensors is broadcast tensor by tensor, from where they lie, rather
    than packed into one: where a group takes pieces. Each costs a few microseconds, and packing
    large ones slows the broadcast that is under way."""
    return sum(layout.places[index].nbytes for index in indices) >= PIECE_BYTES * len(indices)


def default_bucket_bytes(total: int) -> int:
    """Larger for larger models: each bucket of a broadcast costs some 30 us beside its bytes, and
    the first one is packed before anything can be sent."""
    return min(max(256 << 20, total // 16), 1 << 30)


def by_bucket(layout: Layout) -> list[list[int]]:
    """The indices of the tensors in each bucket."""
    found: list[list[int]] = [[] for _ in layout.sizes]
    for index, place in enumerate(layout.places):
        found[place.bucket].append(index)
    return found


def differences(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """What differs between two sets of settings, by name; what is unset counts as ""."""
    names = sorted({*ours, *theirs})
    return [
        f"{name} is {ours.get(name, '')!r} here and {theirs.get(name, '')!r} there"
        for name in names
        if ours.get(name, "") != theirs.get(name, "")
    ]
