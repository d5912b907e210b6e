"""Mixtures of experts: transformers' modules since version 5 hold all experts of a layer in one
tensor, and checkpoints, whose names engines know, one tensor for each.

What is merged how: transformers' ``conversion_mapping.py`` (5.12), "qwen2_moe" (which most models
follow) and "mixtral".
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

_MERGED: Final = re.compile(r"(.+\.experts)\.(gate_up_proj|down_proj)")
_NAMES: Final = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
"""Of a checkpoint's tensors of one expert."""


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
    for renamed in dict.fromkeys((name, name.replace(".mlp.", ".block_sparse_moe."))):
        if renamed != name and renamed in known:
            return [Part(renamed)]
        merged = _MERGED.fullmatch(renamed)
        if merged is None or len(shape) != 3:
            continue
        for gate, up, down in _NAMES:
            ends = (gate, up) if merged[2] == "gate_up_proj" else (down,)
            rows, rest = divmod(shape[1], len(ends))
            parts = [
                Part(f"{merged[1]}.{expert}.{end}.weight", expert, at * rows, rows)
                for expert in range(shape[0])
                for at, end in enumerate(ends)
            ]
            if not rest and parts and all(part.name in known for part in parts):
                return parts
    return []


def take_apart(tensor: Any, parts: Sequence[Part]) -> Iterator[tuple[str, Any]]:
    """The parts by name: views. Those of a DTensor are gathered all at once, when the first one is
    asked for its full value."""
    if parts[0].expert is None:
        yield parts[0].name, tensor
    elif hasattr(tensor, "full_tensor"):
        whole = _Whole(tensor, len(parts))
        for part in parts:
            yield part.name, _GatheredPart(whole, part)
    else:
        experts = tensor.detach().unbind()
        for part in parts:
            yield part.name, experts[part.expert].narrow(0, part.begin, part.rows)


class _Whole:
    """A DTensor; and its full value, until each part of it was asked for."""

    def __init__(self, tensor: Any, parts: int) -> None:
        self.tensor = tensor
        self._left = parts
        self._full: Any = None

    def rows(self, part: Part) -> Any:
        if self._full is None:
            self._full = self.tensor.full_tensor()
        found = self._full[part.expert].narrow(0, part.begin, part.rows)
        self._left -= 1
        if not self._left:
            self._full = None
        return found


class _GatheredPart:
    """As much of a tensor as a sender asks for before it asks for its values."""

    def __init__(self, whole: _Whole, part: Part) -> None:
        self._whole = whole
        self._part = part
        self.device = whole.tensor.device
        self.dtype = whole.tensor.dtype

    def full_tensor(self) -> Any:
        return self._whole.rows(self._part)
