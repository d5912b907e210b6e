"""Attention of many requests at once, compared with one token after the other in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sglrl_workers.engine.sglang.accelerations import ragged_attention

SLOTS, CONTEXT, REQUESTS = 1024, 150, 8


def one_by_one(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    rows: list[int],
    begins: list[int],
    counts: list[int],
    window: int | None,
    scaling: float,
) -> torch.Tensor:
    found, token = [], 0
    for row, begin, count in zip(rows, begins, counts, strict=True):
        for position in range(begin, begin + count):
            first = 0 if window is None else max(0, position - window)
            slots = table[row, first : position + 1].long()
            heads = []
            for head in range(query.shape[1]):
                shared = head * keys.shape[1] // query.shape[1]
                products = keys[slots, shared].double() @ query[token, head].double() * scaling
                heads.append(products.softmax(0) @ values[slots, shared].double())
            found.append(torch.stack(heads))
            token += 1
    return torch.stack(found)


def lengths(chance: np.random.Generator, kind: str) -> tuple[list[int], list[int]]:
    n = int(chance.integers(1, REQUESTS + 1))
    if kind == "decode":
        return chance.integers(0, CONTEXT, n).tolist(), [1] * n
    begins, counts = [], []
    for _ in range(n):
        # Counts of all magnitudes.
        count = int(2 ** chance.uniform(0, 6))
        counts.append(count)
        begins.append(int(chance.integers(0, CONTEXT - count)) * int(chance.integers(0, 2)))
    return begins, counts


@pytest.mark.parametrize("window", [None, 0, 5, 100])
@pytest.mark.parametrize("kind", ["decode", "prefill"])
@pytest.mark.parametrize(("heads", "shared"), [(4, 4), (6, 2), (3, 1)])
def test_every_token_attends_to_its_request_alone(
    kind: str, heads: int, shared: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = np.random.default_rng([heads, len(kind), window or 0])
    torch.manual_seed(int(chance.integers(1 << 30)))
    # These sizes give several blocks per request, and several calls per kind of request.
    monkeypatch.setattr(ragged_attention, "_BLOCK", 16)
    monkeypatch.setattr(ragged_attention, "_MASKED", 3_000)
    for _ in range(4):
        begins, counts = lengths(chance, kind)
        keys, values = torch.randn(SLOTS, shared, 8), torch.randn(SLOTS, shared, 10)
        # Slots that belong to no request may hold any value.
        keys[: SLOTS // 4] = torch.nan
        values[: SLOTS // 4] = torch.inf
        table = torch.from_numpy(chance.integers(0, SLOTS // 4, (REQUESTS, CONTEXT), np.int32))
        rows = chance.permutation(REQUESTS)[: len(begins)].tolist()
        for row, begin, count in zip(rows, begins, counts, strict=True):
            own = chance.integers(SLOTS // 4, SLOTS, begin + count, np.int32)
            table[row, : begin + count] = torch.from_numpy(own)
        query = torch.randn(sum(counts), heads, 8)
        output = torch.full((sum(counts), heads, 10), torch.nan)
        calls = ragged_attention.plan(
            table,
            torch.tensor(rows),
            torch.tensor(begins),
            torch.tensor(counts),
            window,
            ragged_attention.token_bytes(keys, values),
        )
        ragged_attention.attend(calls, query, output, keys, values, 0.3)
        expected = one_by_one(query, keys, values, table, rows, begins, counts, window, 0.3)
        torch.testing.assert_close(output.double(), expected, atol=1e-5, rtol=1e-4)


def test_requests_of_one_length_are_one_call_without_a_mask() -> None:
    table = torch.arange(40, dtype=torch.int32).view(4, 10)
    rows, begins = torch.tensor([3, 1]), torch.tensor([6, 6])
    (call,) = ragged_attention.plan(table, rows, begins, torch.ones_like(begins), None, 64)
    assert call.tokens is None
    assert call.mask is None
    assert call.slots.tolist() == [*range(30, 37), *range(10, 17)]


def test_a_request_alone_needs_no_mask() -> None:
    table = torch.arange(2048, dtype=torch.int32).view(2, 1024)
    row, one = torch.tensor([1]), torch.tensor([1])
    (call,) = ragged_attention.plan(table, row, torch.tensor([4]), one, None, 64)
    assert call.mask is None
    assert call.slots.tolist() == [*range(1024, 1029)]
    for begin, masked in ((0, False), (3, True)):
        (call,) = ragged_attention.plan(
            table, row, torch.tensor([begin]), torch.tensor([200]), None, 64
        )
        assert call.causal is not masked
        assert (call.mask is not None) is masked


def test_a_long_request_does_not_lengthen_the_others() -> None:
    table = torch.zeros(65, 1 << 14, dtype=torch.int32)
    begins = torch.tensor([9_999] + [50] * 64)
    calls = ragged_attention.plan(
        table, torch.arange(65), begins, torch.ones_like(begins), None, 64
    )
    assert sorted(call.shape for call in calls) == [(1, 1, 10_000), (64, 1, 51)]


def test_a_call_gathers_a_bounded_part_of_the_cache() -> None:
    table = torch.zeros(64, 8192, dtype=torch.int32)
    begins = torch.full((64,), 8191)
    calls = ragged_attention.plan(
        table, torch.arange(64), begins, torch.ones_like(begins), None, 8192
    )
    assert sum(n for n, _, _ in (call.shape for call in calls)) == 64
    assert all(n * s * 8192 <= 64 << 20 for n, _, s in (call.shape for call in calls))
