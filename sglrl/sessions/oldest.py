"""The oldest policy versions of sampled tokens, by policy: see ``core/policy_versions.py``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..core.policy_versions import MODEL, oldest_of
from ..inference.completion import Completion
from .turn import Turn


class Leaf(Protocol):
    """The parts of a ``Trajectory`` without branches that are read here."""

    @property
    def loss_mask(self) -> NDArray[np.bool_]: ...
    @property
    def versions(self) -> NDArray[np.int32]: ...
    @property
    def lora_versions(self) -> NDArray[np.int32] | None: ...
    @property
    def turns(self) -> Sequence[Turn]: ...


def oldest_of_turns(turns: Iterable[Completion]) -> dict[str, int]:
    """Return the oldest version of each policy that sampled a token of these turns."""
    found: dict[str, int] = {}
    for turn in turns:
        lora = turn.lora
        for chunk in turn.chunks:
            if chunk.ids:
                found[MODEL] = min(chunk.version, found.get(MODEL, chunk.version))
                if lora is not None:
                    found[lora] = min(chunk.lora_version, found.get(lora, chunk.lora_version))
    return found


def oldest_of_leaves(leaves: Iterable[Leaf]) -> dict[str, int]:
    """Return the oldest version of each policy that sampled a token of these conversations."""
    found: list[dict[str, int]] = []
    for leaf in leaves:
        sampled = leaf.versions[leaf.loss_mask]
        if len(sampled):
            found.append({MODEL: int(sampled.min())})
        if leaf.lora_versions is not None:
            for turn in leaf.turns:
                own = leaf.lora_versions[turn.start : turn.stop]
                own = own[own >= 0]
                if turn.lora and len(own):
                    found.append({turn.lora: int(own.min())})
    return oldest_of(found)
