"""Sampling masks in tensors, against a slow and simple reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from core.test_trajectory import make

from sglrl.errors import UsageError
from sglrl.inference.sampling_mask import SamplingMask
from sglrl.rl import apply_sampling_mask, token_logprobs
from sglrl.sessions.tensors import stack
from sglrl.sessions.trajectory import Trajectory

SETS = [[2, 4], [5], [], [0, 7, 9], [8]]
"""For the response 4, 5, 6, 7, 8 after a prompt of 3 tokens."""


def masked() -> Trajectory:
    ids = np.array([id_ for one in SETS for id_ in one], np.int32)
    return make(sampling_mask=SamplingMask(ids, np.cumsum([0, *map(len, SETS)])))


def test_padded() -> None:
    short = make(prompt_ids=[1])
    for side in ("right", "left"):
        batch = stack([short, masked()], padding_side=side, pad_to=10)
        assert batch["mask_lengths"].dtype == batch["mask_ids"].dtype == torch.int64
        assert batch["mask_lengths"][0].tolist() == [0] * 10
        expected = [0, 0, 0, 2, 1, 0, 3, 1]
        padding = [0, 0]
        row = batch["mask_lengths"][1].tolist()
        assert row == (expected + padding if side == "right" else padding + expected)
        assert batch["mask_ids"].tolist() == [[-1] * 7, [2, 4, 5, 0, 7, 9, 8]]
    assert "mask_ids" not in stack([short])
    assert "mask_lengths" not in stack([short])


def test_jagged() -> None:
    batch = stack([make(), masked()], "jagged")
    assert [row.tolist() for row in batch["mask_lengths"].unbind()] == [
        [0] * 8,
        [0, 0, 0, 2, 1, 0, 3, 1],
    ]
    assert [row.tolist() for row in batch["mask_ids"].unbind()] == [[], [2, 4, 5, 0, 7, 9, 8]]


@pytest.mark.parametrize("side", ["right", "left"])
def test_logprobs_of_the_limited_distribution(side: Any) -> None:
    batch = stack([masked(), make(), masked()], padding_side=side, pad_to=11)
    torch.manual_seed(0)
    logits = torch.randn(3, 11, 10, requires_grad=True)
    limited = apply_sampling_mask(logits, batch["mask_ids"], batch["mask_lengths"])
    found = token_logprobs(limited, batch["input_ids"])
    for row in range(3):
        ids, lengths = batch["mask_ids"][row].tolist(), batch["mask_lengths"][row].tolist()
        for at in range(1, 11):
            own, ids = ids[: lengths[at]], ids[lengths[at] :]
            values = logits[row, at - 1]
            token = batch["input_ids"][row, at]
            expected = values[token] - torch.logsumexp(values[own] if own else values, 0)
            torch.testing.assert_close(found[row, at], expected)
    found.sum().backward()
    assert torch.isfinite(logits.grad).all()


def test_parts_that_do_not_belong_together() -> None:
    batch = stack([masked()])
    ids, lengths = batch["mask_ids"], batch["mask_lengths"]
    logits = torch.zeros(1, 8, 10)
    for wrong in (
        (logits[:, :7], ids, lengths),
        (logits, ids[:, :5], lengths),
        (logits, ids, lengths.roll(-3, 1)),
    ):
        with pytest.raises(UsageError):
            apply_sampling_mask(*wrong)
