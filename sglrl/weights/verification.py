"""Compare tensors with the live weights of the workers, by checksum."""

from __future__ import annotations

import asyncio
from typing import Any

from ..config import check_timeout
from ..core.manifest import check_manifest
from ..core.weight_update import Member
from ..wire.weights import Shard, TensorSpec
from .deadline import Deadline
from .port import WeightsPort


async def differing_tensors(live: WeightsPort, weights: Any, timeout: float) -> list[str]:
    """Return the names of the tensors whose live values differ, in the order of ``weights``."""
    from .tensor_source import Manifest, named_tensors

    deadline = Deadline(check_timeout(timeout))
    named = named_tensors(weights)
    wanted = await live.describe(deadline.left)
    manifest = Manifest()
    tensors = manifest.take(named, wanted)
    specs = manifest.specs
    check_manifest(wanted, specs, partial=True)
    untied = {name for name, _ in manifest.untied(named)}
    found = await live.checksums([spec.name for spec in specs], deadline.left)
    differing = await asyncio.get_running_loop().run_in_executor(
        None, _differing, tensors, specs, found
    )
    return [name for name, _ in manifest.spread(named) if name in untied or name in differing]


def _differing(tensors: Any, specs: list[TensorSpec], found: dict[Member, list[Shard]]) -> set[str]:
    import torch

    from .checksum import checksum, piece
    from .tensor_source import whole

    by_name: dict[str, list[Shard]] = {}
    for pieces in found.values():
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
