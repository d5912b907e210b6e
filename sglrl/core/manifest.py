"""The manifest of an update lists its tensors. Check it against the model, and form the buckets.

The sender and the workers compute the same buckets from the same manifest, so they only have to
agree on the manifest and ``bucket_bytes``. A tensor is never split. A tensor that is larger than a
bucket gets a bucket of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Final, NamedTuple

from ..errors import InvalidWeights
from ..wire.weights import ModelDescription, TensorSpec

ALIGNMENT: Final = 256
"""Bytes. Tensors begin at multiples of this, like the allocations of CUDA's allocator."""

FLOAT_BYTES: Final = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}
"""The dtypes that weights may have, with the bytes of one element."""

PIECE_BYTES: Final = 8 << 20

_SHOWN = 8


def tensor_bytes(spec: TensorSpec) -> int:
    """Return the bytes of a tensor. Raise ``InvalidWeights`` if weights cannot have its dtype."""
    size = FLOAT_BYTES.get(spec.dtype)
    if size is None:
        raise InvalidWeights(
            f"{spec.name} is {spec.dtype}; weights are one of {', '.join(FLOAT_BYTES)}"
        )
    return prod(spec.shape) * size


def total_bytes(specs: Iterable[TensorSpec]) -> int:
    return sum(map(tensor_bytes, specs))


def is_computed(name: str) -> bool:
    """Return True if a tensor of this name is computed from the configuration of the model.

    Such a tensor is a buffer of a module, and checkpoints do not contain it.
    """
    return ".rotary_emb." in name


def merged(descriptions: Sequence[ModelDescription]) -> ModelDescription:
    """Merge the descriptions of the ranks of one engine.

    Each rank describes the tensors that it loads and the tensors that it ignores, for example the
    experts of other ranks. The engine ignores only tensors that no rank loads.
    """
    taken = {spec.name: spec for one in descriptions for spec in one.tensors}
    ignored = {name for one in descriptions for name in one.ignored} - taken.keys()
    tied = {name: twin for one in descriptions for name, twin in one.tied.items()}
    is_open = all(one.open for one in descriptions)
    return ModelDescription([*taken.values()], sorted(ignored), tied, is_open)


def is_whole(wanted: ModelDescription, given: Sequence[TensorSpec]) -> bool:
    """Return True if the given tensors are known to include all tensors of the model."""
    return not wanted.open and {spec.name for spec in wanted.tensors} <= {s.name for s in given}


def known_after(wanted: ModelDescription, given: Sequence[TensorSpec]) -> ModelDescription:
    """Return the description of the model after an update of all tensors.

    If the model was ``open``, the given tensors are now its tensors. Otherwise nothing changes.
    """
    return ModelDescription([*given], []) if wanted.open else wanted


def check_manifest(
    wanted: ModelDescription, given: Sequence[TensorSpec], *, partial: bool = False
) -> None:
    """Check that the ``given`` tensors fit the model.

    Args:
        partial: whether tensors may be missing. Missing tensors keep their values.

    Raises:
        InvalidWeights: the tensors do not fit. The message lists all problems. If many tensors have
            a problem, it names the first ones.
    """
    known = {spec.name: spec for spec in (given if wanted.open else wanted.tensors)}
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
    if hint := _hint(unknown, known):
        problems.append(hint)
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


WITH_ADAPTERS: Final = (
    "these are the tensors of a PeftModel: to send its adapter, pass the model with the adapter's "
    "name, as in client.update_weights(model, lora=name); to send merged weights, pass the model "
    "that merge_and_unload() returns"
)
"""The error text for the tensors of a model with adapters: the reason, and what to send instead."""


class ManifestCheck:
    """Checks manifests. The latest list object that fit is not checked again."""

    def __init__(self) -> None:
        self._fitting: tuple[Sequence[TensorSpec], bool] | None = None

    def check(
        self, wanted: ModelDescription, given: Sequence[TensorSpec], *, partial: bool
    ) -> None:
        """Check a manifest, as ``check_manifest`` does.

        The sender leaves out tensors that the engine does not keep, so a partial manifest may be
        empty.
        """
        if self._fitting is not None:
            specs, was_partial = self._fitting
            if specs is given and partial == was_partial:
                return
        if given or not partial:
            check_manifest(wanted, given, partial=partial)
        self._fitting = (given, partial)


def _hint(unknown: Sequence[str], known: Mapping[str, TensorSpec]) -> str:
    """Return a hint how to change names that the model does not have; "" if there is none."""
    parts = {part for name in unknown for part in name.split(".")}
    if "base_layer" in parts or any(part.startswith("lora_") for part in parts):
        return WITH_ADAPTERS
    for name in unknown[:1]:
        path = name.split(".")
        for start in range(1, len(path)):
            if ".".join(path[start:]) in known:
                return f"remove the prefix {'.'.join(path[:start])!r} and its dot from the names"
        for extra in dict.fromkeys(path):
            if ".".join(part for part in path if part != extra) in known:
                return f"remove {extra!r} and its dot from the names"
        longer = [other for other in known if other.endswith(f".{name}")]
        if len(longer) == 1:
            return f"put {longer[0].removesuffix(name)!r} before the names"
    return ""


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


class BucketSlice(NamedTuple):
    """The place of a tensor: bytes ``offset`` to ``offset + nbytes`` of bucket ``bucket``."""

    bucket: int
    offset: int
    nbytes: int


class Layout(NamedTuple):
    """The buckets of a manifest.

    Attributes:
        places: the places of the tensors, in the order of the manifest.
        sizes: bytes of each bucket.
        ring_slot: bytes of the largest bucket that does not exceed ``bucket_bytes``. If all buckets
            exceed it, bytes of the largest bucket.
    """

    places: list[BucketSlice]
    sizes: list[int]
    ring_slot: int

    @property
    def total(self) -> int:
        return sum(self.sizes)


def lay_out(specs: Sequence[TensorSpec], bucket_bytes: int) -> Layout:
    """Fill buckets with the tensors in order. Raise ``InvalidWeights`` as ``tensor_bytes`` does."""
    places: list[BucketSlice] = []
    sizes: list[int] = []
    for spec in specs:
        nbytes = tensor_bytes(spec)
        # An empty tensor also takes space, because no bucket may be empty.
        space = -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT
        if not sizes or sizes[-1] + space > bucket_bytes:
            sizes.append(0)
        places.append(BucketSlice(len(sizes) - 1, sizes[-1], nbytes))
        sizes[-1] += space
    fitting = [size for size in sizes if size <= bucket_bytes]
    return Layout(places, sizes, max(fitting, default=max(sizes, default=0)))


def in_pieces(layout: Layout, indices: Sequence[int]) -> bool:
    """Return True if a bucket of these tensors is broadcast in pieces, one tensor at a time.

    Tensors of at least ``PIECE_BYTES`` on average are not packed into one buffer, because packing
    slows the broadcast that is running. Each piece costs a few microseconds. Only groups that
    support pieces use them.
    """
    return sum(layout.places[index].nbytes for index in indices) >= PIECE_BYTES * len(indices)


def default_bucket_bytes(total: int) -> int:
    """Return the bucket size for ``total`` bytes. Larger models have larger buckets.

    Each bucket of a broadcast costs about 30 us in addition to the time for its bytes. On the other
    hand, the first bucket must be packed before anything can be sent.
    """
    return min(max(256 << 20, total // 16), 1 << 30)


def by_bucket(layout: Layout) -> list[list[int]]:
    """Return the indices of the tensors in each bucket."""
    buckets: list[list[int]] = [[] for _ in layout.sizes]
    for index, place in enumerate(layout.places):
        buckets[place.bucket].append(index)
    return buckets


def differences(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """Describe each difference between two sets of settings. An unset setting counts as ""."""
    names = sorted({*ours, *theirs})
    return [
        f"{name} is {ours.get(name, '')!r} here and {theirs.get(name, '')!r} there"
        for name in names
        if ours.get(name, "") != theirs.get(name, "")
    ]
