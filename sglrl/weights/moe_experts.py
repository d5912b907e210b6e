"""Mixtures of experts: transformers' modules since version 5 hold all experts of a layer in one
tensor, and checkpoints, whose names engines know, one tensor for each.

What is merged how: transformers' ``conversion_mapping.py`` (5.12), "qwen2_moe" (which most models
follow) and "mixtral".
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

_MERGED: Final = re.compile(r"(.+\.experts)\.(gate_up_proj|down_proj)")
_IN_MIXTRAL: Final = ".mlp.", ".block_sparse_moe."
EXPERT_NAMES: Final = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
"""Of a checkpoint's tensors of one expert: as most models call them, and as Mixtral does."""


class Part(NamedTuple):
    """Rows ``begin`` to ``begin + rows`` of one expert's matrix, and what checkpoints call them.
    ``expert`` None: all of the tensor, under another name."""

    name: str
    expert: int | None = None
    begin: int = 0
    rows: int = 0


def parts_of(name: str, shape: Sequence[int], known: Mapping[str, Any]) -> list[Part]:
    """What a tensor that the engine does not know by its name is made of that it knows; or
    nothing."""
    for renamed in dict.fromkeys((name, name.replace(*_IN_MIXTRAL))):
        if renamed != name and renamed in known:
            return [Part(renamed)]
        for ends in EXPERT_NAMES:
            parts = _parts(renamed, shape, ends)
            if parts and all(part.name in known for part in parts):
                return parts
    return []


def _parts(name: str, shape: Sequence[int], names: tuple[str, str, str]) -> list[Part]:
    """Of a tensor of all experts of a layer; of any other nothing."""
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
    """Names and shapes of a module's tensors, as a checkpoint has them whose experts' tensors are
    called so: one of ``EXPERT_NAMES``."""
    found = []
    for name, shape in tensors:
        if names == EXPERT_NAMES[1]:
            name = name.replace(*_IN_MIXTRAL)
        parts = _parts(name, shape, names)
        found += [(part.name, (part.rows, *shape[2:])) for part in parts] or [(name, shape)]
    return found


def take_apart(tensor: Any, parts: Sequence[Part]) -> Iterator[tuple[str, Any]]:
    """The parts by name: views. Those of a DTensor are gathered all at once, when the first one is
    asked for its full value."""
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
    """A DTensor of which several are made: what a sender asks for before it asks for values, and
    the full value, which is gathered once and kept until the last of ``uses``."""

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
