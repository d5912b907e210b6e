"""Find the padding tokens in rows of token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def unpad(
    rows: Sequence[Any], masks: Sequence[torch.Tensor] | None, pad: int, pad_is_end: bool
) -> list[torch.Tensor]:
    """Return bool [length] for every row of token ids [length]: False at padding.

    Given masks are returned unchanged, as bool on the CPU. Without masks, padding is the run of
    ``pad`` at either end. Tokens in between never count as padding.

    If the padding token also ends texts (``pad_is_end``), the last token of a row may belong to the
    text. A batch is padded to its longest row, so the shortest run at the right of all rows is
    kept as text.

    Args:
        masks: attention masks of the rows, or None.
        pad: id of the padding token.
        pad_is_end: the padding token also ends texts.
    """
    if masks is not None:
        return [mask.detach().bool().cpu() for mask in masks]
    runs = [_runs(torch.as_tensor(row) == pad) for row in rows]
    common = 0
    if pad_is_end:
        common = min(right for _, right in runs)
        if any(left for left, _ in runs) or len({len(row) for row in rows}) > 1:
            # The rows are padded on the left, or not at all. The runs at the right are text.
            common = max(right for _, right in runs)
    kept = []
    for row, (left, right) in zip(rows, runs, strict=True):
        mask = torch.ones(len(row), dtype=torch.bool)
        mask[:left] = False
        mask[len(row) - max(0, right - common) :] = False
        kept.append(mask)
    return kept


def _runs(is_pad: torch.Tensor) -> tuple[int, int]:
    """Return the lengths of the runs of True at the left and at the right.

    If all values are True, return (0, length).
    """
    others = (~is_pad).nonzero().flatten()
    if not len(others):
        return 0, len(is_pad)
    return int(others[0]), len(is_pad) - 1 - int(others[-1])
