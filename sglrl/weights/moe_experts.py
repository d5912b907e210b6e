"""Mixture-of-experts modules: convert between merged tensors and tensors of single experts.

Since version 5, the modules of transformers hold all experts of a layer in one tensor. Checkpoints
have one tensor per expert, and engines use the names in the checkpoints.

The source of the merging rules is transformers' ``conversion_mapping.py`` (5.12), "qwen2_moe"
(which most models follow) and "mixtral".
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

_MERGED: Final = re.compile(r"(.+\.experts)\.(gate_up_proj|down_proj)")
_IN_MIXTRAL: Final = ".mlp.", ".block_sparse_moe."
EXPERT_NAMES: Final = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
"""The names of one expert's tensors in a checkpoint, for most models and for Mixtral."""


class Part(NamedTuple):
    """Rows ``begin`` to ``begin + rows`` of one expert's matrix.

    Attributes:
        name: the name of these rows in checkpoints.
        expert: the index of the expert. None if the part is the whole tensor under another name.
    """

    name: str
    expert: int | None = None
    begin: int = 0
    rows: int = 0


def parts_of(name: str, shape: Sequence[int], known: Mapping[str, Any]) -> list[Part]:
    """Split a tensor whose name the engine does not know into parts that the engine knows.

    Args:
        known: the engine's tensors by name.

    Returns:
        The parts, or an empty list if no split fits.
    """
    for renamed in dict.fromkeys((name, name.replace(*_IN_MIXTRAL))):
        if renamed != name and renamed in known:
            return [Part(renamed)]
        for ends in EXPERT_NAMES:
            parts = _parts(renamed, shape, ends)
            if parts and all(part.name in known for part in parts):
                return parts
    return []


def _parts(name: str, shape: Sequence[int], names: tuple[str, str, str]) -> list[Part]:
    """Return the parts of a tensor with all experts of a layer. Other tensors have no parts."""
    merged = _MERGED.fullmatch(name)
    if merged is None or len(shape) != 3:
        return []
    gate, up, down = names
    ends = (gate, up) if merged[2] == "gate_up_proj" else (down,)
    rows, rest = divmod(shape[1], len(ends))
    if rest:
        return []
    return [
        Part(f"{merged[1]}.{expert}.{end}.weight", expert, at * rows, rows)
        for expert in range(shape[0])
        for at, end in enumerate(ends)
    ]


def names_apart(
    tensors: Iterable[tuple[str, tuple[int, ...]]], names: tuple[str, str, str]
) -> list[tuple[str, tuple[int, ...]]]:
    """Return the names and shapes that a module's tensors have in a checkpoint.

    Args:
        names: the item of ``EXPERT_NAMES`` for the checkpoint.
    """
    separate = []
    for name, shape in tensors:
        if names == EXPERT_NAMES[1]:
            name = name.replace(*_IN_MIXTRAL)
        parts = _parts(name, shape, names)
        separate += [(part.name, (part.rows, *shape[2:])) for part in parts] or [(name, shape)]
    return separate


def take_apart(tensor: Any, parts: Sequence[Part]) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a tensor with their names, as views.

    The parts of a DTensor are gathered together, at the first ``full_tensor`` call of a part.
    """
    if parts[0].expert is None:
        yield parts[0].name, tensor
    elif hasattr(tensor, "full_tensor"):
        whole = Whole(tensor, len(parts))
        for part in parts:
            yield part.name, _GatheredPart(whole, part)
    else:
        experts = tensor.detach().unbind()
        for part in parts:
            yield part.name, experts[part.expert].narrow(0, part.begin, part.rows)


class Whole:
    """A DTensor that several sent tensors share.

    The object has the attributes that a sender reads before it reads values. The full value is
    gathered once and kept until its last use.

    Attributes:
        uses: the number of ``full_tensor`` calls that are still expected.
    """

    def __init__(self, tensor: Any, uses: int) -> None:
        self.device = tensor.device
        self.dtype = tensor.dtype
        self.uses = uses
        self._tensor = tensor
        self._full: Any = None

    def full_tensor(self) -> Any:
        full = self._full
        if full is None:
            full = self._tensor.full_tensor()
        self.uses -= 1
        self._full = full if self.uses else None
        return full


class _GatheredPart:
    def __init__(self, whole: Whole, part: Part) -> None:
        self.device = whole.device
        self.dtype = whole.dtype
        self._whole = whole
        self._part = part

    def full_tensor(self) -> Any:
        part = self._part
        return self._whole.full_tensor()[part.expert].narrow(0, part.begin, part.rows)
