"""Compare tensors with the live weights of the workers, by checksum."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from ..config import check_timeout
from ..core.manifest import check_manifest
from ..errors import InvalidAdapter, InvalidWeights, UsageError
from ..wire.weights import ModelDescription, Shard, TensorSpec
from .deadline import Deadline
from .port import WeightsPort

if TYPE_CHECKING:
    from .tensor_source import Manifest, Named, Taken

_SHOWN = 4
TIED: Final = "and the engine has one tensor for both (its model ties them: tie_word_embeddings)"
Ask = Callable[[list[str], float | None], Awaitable[Mapping[Any, list[Shard]]]]
"""A function that returns checksums of live tensors by rank, as ``WeightsPort.checksums`` does."""


async def differing_tensors(live: WeightsPort, weights: Any, timeout: float) -> list[str]:
    """Return the names of the tensors whose live values differ, in the order of ``weights``."""
    from .tensor_source import Manifest, named_tensors

    deadline = Deadline(check_timeout(timeout))
    named = named_tensors(weights)
    wanted = await live.describe(deadline.left)
    manifest = Manifest()
    tensors = manifest.take(named, wanted)
    specs = manifest.specs
    if specs:
        check_manifest(wanted, specs, partial=True)
    untied = {name for name, _ in manifest.untied(named)}
    untied |= await _differing_alone(manifest.alone(named), live.checksums, wanted, deadline)
    differing: set[str] = set()
    if specs:
        shards = await live.checksums([spec.name for spec in specs], deadline.left)
        differing = await asyncio.get_running_loop().run_in_executor(
            None, _differing, tensors, specs, [*shards.values()]
        )
    return [name for name, _ in manifest.spread(named) if name in untied or name in differing]


async def check_ties(
    manifest: Manifest, given: Taken, ask: Ask, wanted: ModelDescription, deadline: Deadline
) -> None:
    """Check that tensors that the engine ties to each other have the same values.

    If the tensor that the engine keeps is not given, the live values of this tensor are used.

    Args:
        manifest: the manifest whose ``take`` has selected from ``given``.

    Raises:
        InvalidWeights: the values differ.
    """
    for name, twin in manifest.untied(given.named):
        raise InvalidWeights(f"{name} differs from {twin}, {TIED}")
    if alone := manifest.alone(given.named):
        await asyncio.to_thread(_wait, given)
        for name in sorted(await _differing_alone(alone, ask, wanted, deadline)):
            twin = wanted.tied[name]
            raise InvalidWeights(
                f"{name} differs from the engine's {twin}, {TIED}; send new values of {twin} in "
                "the same update or before"
            )


def _wait(given: Taken) -> None:
    for event in given.ready:
        event.synchronize()


async def _differing_alone(
    alone: list[tuple[str, str, Any]], ask: Ask, wanted: ModelDescription, deadline: Deadline
) -> set[str]:
    """Return the names of left-out tensors that differ from the live tensors they are tied to."""
    if not alone:
        return set()
    dtypes = {spec.name: spec.dtype for spec in wanted.tensors}
    shards = await ask([twin for _, twin, _ in alone], deadline.left)
    differing = await asyncio.get_running_loop().run_in_executor(
        None,
        _differing,
        [(twin, tensor) for _, twin, tensor in alone],
        [TensorSpec(twin, dtypes[twin], tuple(tensor.shape)) for _, twin, tensor in alone],
        [*shards.values()],
    )
    return {name for name, twin, _ in alone if twin in differing}


class BaseCheck:
    """Checks that the workers have the weights of the base model of a LoRA adapter.

    A check reads all weights, so it is not repeated for parameters that have not changed.
    """

    def __init__(self, live: WeightsPort) -> None:
        self._live = live
        self._checked: tuple[int, list[tuple[Any, int, int]]] = (-1, [])
        """The workers' version at the last check that found no difference, and its parameters.

        Each parameter is a weak reference, the address of its data, and torch's change counter.
        """

    async def check(self, base: Taken, wanted: ModelDescription, deadline: Deadline) -> None:
        """Compare parameters with the live weights.

        Parameters whose values cannot be compared are left out: quantized or sharded parameters,
        and parameters with a dtype that cannot hold all values of the engine's dtype. While the
        weights are asleep, nothing is compared.

        Raises:
            InvalidAdapter: the weights differ.
            UpdateInProgress: an update was still running at the deadline.
        """
        if self._is_checked(base.named):
            return
        version = self._live.version
        named = [pair for pair in base.named if _is_plain(pair[1])]
        differing = await self._differing(named, wanted, base, deadline)
        if differing is None:
            return
        if differing:
            more = f" and {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
            raise InvalidAdapter(
                "the base model of the PeftModel differs from the engine's weights in "
                f"{', '.join(differing[:_SHOWN])}{more}; send it first with update_weights, or "
                "give the adapter alone: get_peft_model_state_dict(model) with config="
            )
        if self._live.version == version:
            states = [(weakref.ref(t), t.data_ptr(), t._version) for _, t in base.named]
            self._checked = version, states

    def _is_checked(self, named: Named) -> bool:
        version, states = self._checked
        return (
            version == self._live.version
            and len(states) == len(named)
            and all(
                ref() is tensor and (address, changes) == (tensor.data_ptr(), tensor._version)
                for (ref, address, changes), (_, tensor) in zip(states, named, strict=True)
            )
        )

    async def _differing(
        self, named: Named, wanted: ModelDescription, base: Taken, deadline: Deadline
    ) -> list[str] | None:
        """Return the names of the tensors that differ, or None if the weights are asleep."""
        from .tensor_source import Manifest

        if not named:
            return []
        manifest = Manifest()
        tensors = manifest.take(named, wanted)
        known = {spec.name: spec for spec in wanted.tensors}
        rows = [
            (pair, spec)
            for pair, spec in zip(tensors, manifest.specs, strict=True)
            if spec.name in known and _keeps(pair[1], spec.dtype)
        ]
        names = [spec.name for _, spec in rows if spec.shape != known[spec.name].shape]
        names += [name for name, _ in manifest.untied(named)]
        if names or not rows:
            return names
        try:
            live = await self._live.checksums([spec.name for _, spec in rows], deadline.left)
        except UsageError:
            return None
        await asyncio.to_thread(_wait, base)
        differing = await asyncio.get_running_loop().run_in_executor(
            None,
            _differing,
            [pair for pair, _ in rows],
            [spec for _, spec in rows],
            [*live.values()],
        )
        return sorted(differing)


def _is_plain(tensor: Any) -> bool:
    is_whole = not hasattr(tensor, "full_tensor") and tensor.numel() > 0
    return is_whole and tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1


def _keeps(tensor: Any, dtype: str) -> bool:
    """Return True if the tensor's dtype can hold every value of ``dtype``."""
    import torch

    of_engine = getattr(torch, dtype)
    if of_engine.itemsize == 1:
        return False
    kept: bool = torch.promote_types(tensor.dtype, of_engine) == tensor.dtype
    return kept


def _differing(tensors: Any, specs: list[TensorSpec], shards: list[list[Shard]]) -> set[str]:
    import torch

    from .checksum import checksum, piece
    from .tensor_source import whole

    by_name: dict[str, list[Shard]] = {}
    for pieces in shards:
        for one in pieces:
            by_name.setdefault(one.name, []).append(one)
    differing = set()
    with torch.no_grad():
        for (name, tensor), spec in zip(tensors, specs, strict=True):
            sent = whole(tensor).to(getattr(torch, spec.dtype))
            known: dict[Any, int] = {}
            for one in by_name.get(name, []):
                key = (one.offset, one.size, one.stride)
                if key not in known:
                    known[key] = checksum(piece(sent, *key))
                if known[key] != one.checksum:
                    differing.add(name)
                    break
    return differing
