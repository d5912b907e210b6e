"""The versions of adapters in tensors."""

from __future__ import annotations

import torch
from core.test_lora_versions import VERSIONS
from core.test_trajectory import make

from sglrl.sessions.tensors import stack


def test_both_layouts() -> None:
    given = [make(prompt_ids=[1]), make(lora_versions=VERSIONS)]
    for side in ("right", "left"):
        found = stack(given, padding_side=side, pad_to=9)["lora_versions"]
        assert found.dtype == torch.int64
        row = [-1, -1, -1, *VERSIONS]
        rows = [[-1] * 9, [*row, -1] if side == "right" else [-1, *row]]
        assert found.tolist() == rows
    jagged = stack(given, "jagged")["lora_versions"]
    assert [row.tolist() for row in jagged.unbind()] == [[-1] * 6, [-1, -1, -1, *VERSIONS]]
    assert "lora_versions" not in stack(given[:1])
