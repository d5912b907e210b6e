"""Which tokens of given rows are padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def unpad(
    rows: Sequence[Any], masks: Sequence[torch.Tensor] | None, pad: int, pad_is_end: bool
) -> list[torch.Tensor]:
    """bool [length] for every row of token ids [length]: False where it is padding.

    Masks that are given say so themselves. Without, padding is the run of ``pad`` at either end;
    tokens in between are never taken for it. Where the padding token also ends texts
    (``pad_is_end``), a row's last token may be meant: then, of the runs at the right, what all rows
    have in common is theirs, because a batch is padded to its longest row.
    """
    if masks is not None:
        return [mask.detach().bool().cpu() for mask in masks]
    runs = [_runs(torch.as_tensor(row) == pad) for row in rows]
    common = 0
    if pad_is_end:
        common = min(right for _, right in runs)
        if any(left for left, _ in runs) or len({len(row) for row in rows}) > 1:
            # Padded on the left, or not at all.
            common = max(right for _, right in runs)
    kept = []
    for row, (left, right) in zip(rows, runs, strict=True):
        mask = torch.ones(len(row), dtype=torch.bool)
        mask[:left] = False
        mask[len(row) - max(0, right - common) :] = False
        kept.append(mask)
    return kept


def _runs(is_pad: torch.Tensor) -> tuple[int, int]:
    """Length of the runs of True at the left and at the right; (0, length) if there is no other."""
    others = (~is_pad).nonzero().flatten()
    if not len(others):
        return 0, len(is_pad)
    return int(others[0]), len(is_pad) - 1 - int(others[-1])
