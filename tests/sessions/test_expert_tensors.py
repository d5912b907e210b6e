"""Routed experts in tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from core.test_trajectory import make

from sglrl.errors import UsageError
from sglrl.sessions.tensors import stack

ROWS = np.arange(7 * 2 * 3, dtype=np.uint8).reshape(7, 2, 3)
"""For a prompt of 3 and a response of 5 tokens, of which the last one has no row."""
NOTHING = [[0, 1, 2]] * 2


@pytest.mark.parametrize("dtype", [np.uint8, np.int16])
def test_padded(dtype: Any) -> None:
    rows = ROWS.astype(dtype)
    batch = [make(routed_experts=rows), make(prompt_ids=[1]), make(routed_experts=rows[:2])]
    for side in ("right", "left"):
        made = stack(batch, padding_side=side, pad_to=10)
        assert made["routed_experts"].shape == (3, 10, 2, 3)
        assert made["routed_experts"].dtype == (torch.uint8 if dtype == np.uint8 else torch.int16)
        assert made["routed_length"].tolist() == [7, 0, 2]
        padding = [NOTHING] * 2
        for row, known in ((0, rows), (2, rows[:2])):
            tokens = [*known.tolist(), *[NOTHING] * (8 - len(known))]
            expected = [*tokens, *padding] if side == "right" else [*padding, *tokens]
            assert made["routed_experts"][row].tolist() == expected
        assert made["routed_experts"][1].tolist() == [NOTHING] * 10
    assert not {"routed_experts", "routed_length"} & set(stack([make()]).keys())


def test_jagged() -> None:
    made = stack([make(prompt_ids=[1]), make(routed_experts=ROWS)], "jagged")
    first, second = made["routed_experts"].unbind()
    assert first.tolist() == [NOTHING] * 6
    assert second.tolist() == [*ROWS.tolist(), NOTHING]


def test_experts_of_different_models() -> None:
    with pytest.raises(UsageError, match="have different shapes"):
        stack([make(routed_experts=ROWS), make(routed_experts=ROWS[:, :1])])
