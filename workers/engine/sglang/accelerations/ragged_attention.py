"""Attention for requests of different lengths in few padded calls. Needs only torch and numpy."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import scaled_dot_product_attention

_BLOCK = 256
"""Maximum new tokens of a piece of a request. A mask has at most this number of rows."""
_ALIKE = 8, 64
"""New tokens and context tokens. Up to these numbers, requests count as equally long."""
_MASKED = 1 << 21
"""Maximum elements of the mask of one call."""
_GATHERED = 32 << 20
"""Maximum bytes of keys and values in one call, which copies them to contiguous memory."""


class Call(NamedTuple):
    """One call, for n pieces of requests with up to q new tokens and s tokens of context.

    Attributes:
        tokens: int64 [n * q], the rows of the queries. A short piece repeats its last row. None
            means all rows.
        slots: int64 [n * s], the slots in the KV cache. A short piece repeats its first slot.
        mask: bool [n, 1, q, s], True where a token is attended to. None means everywhere.
        shape: n, q, s.
        causal: the call is for one request whose tokens are all new. Each token attends to itself
            and to earlier tokens.
    """

    tokens: torch.Tensor | None
    slots: torch.Tensor
    mask: torch.Tensor | None
    shape: tuple[int, int, int]
    causal: bool = False


def token_bytes(keys: torch.Tensor, values: torch.Tensor) -> int:
    """Return the number of bytes of a token in one layer of the KV cache.

    Args:
        keys, values: the cache, shape [slots, heads, size].
    """
    return int(keys[0].nbytes + values[0].nbytes)


def plan(
    table: torch.Tensor,
    rows: torch.Tensor,
    begins: torch.Tensor,
    counts: torch.Tensor,
    window: int | None,
    bytes_a_token: int,
) -> list[Call]:
    """Return the calls for a step.

    The slots of request i in the KV cache are in ``table[rows[i]]``. Its ``counts[i]`` new tokens
    follow ``begins[i]`` earlier tokens.

    Args:
        table: int [requests, context].
        rows, begins, counts: int [b].
        window: the number of earlier tokens to which a token attends. None means all.
        bytes_a_token: the result of ``token_bytes``.
    """
    if len(rows) == 1 and counts[0] == 1 and window is None:
        slots = table[rows[0], : int(begins[0]) + 1].long()
        return [Call(None, slots, None, (1, 1, len(slots)))]
    if window is None and (call := _decode(table, rows, begins, counts, bytes_a_token)):
        return [call]
    calls = []
    which, begin, count, first = pieces(begins.numpy(), counts.numpy())
    if window is None:
        # The causal kernel needs no mask and skips later tokens, so use it for new prompts.
        whole = (begins == 0) & (counts > (_BLOCK if len(rows) > 1 else 0))
        for request in whole.nonzero().flatten().tolist():
            size = int(counts[request])
            at = int(counts[:request].sum())
            slots = table[rows[request], :size].long()
            calls.append(Call(torch.arange(at, at + size), slots, None, (1, size, size), True))
        rest = ~whole.numpy()[which]
        which, begin, count, first = which[rest], begin[rest], count[rest], first[rest]
        if not len(which):
            return calls
    length = begin + count
    kind = np.stack([_magnitude(count, _ALIKE[0]), _magnitude(length, _ALIKE[1])])
    order = np.lexsort(kind)
    changes = np.flatnonzero((np.diff(kind[:, order]) != 0).any(0)) + 1
    for alike in np.split(order, changes):
        q, s = int(count[alike].max()), int(length[alike].max())
        most = max(1, min(_MASKED // (q * s), _GATHERED // (s * bytes_a_token)))
        for at in range(0, len(alike), most):
            part = alike[at : at + most]
            which_, begin_, count_, first_ = (
                torch.from_numpy(values[part]) for values in (which, begin, count, first)
            )
            in_order = q == 1 and len(part) == len(rows)
            calls.append(_call(table, rows[which_], begin_, count_, first_, window, in_order))
    return calls


def _decode(
    table: torch.Tensor,
    rows: torch.Tensor,
    begins: torch.Tensor,
    counts: torch.Tensor,
    bytes_a_token: int,
) -> Call | None:
    """Return the single call of a step in which each request has one new token.

    Return None if a request has more new tokens, or if the lengths differ too much.
    """
    lengths = begins.numpy() + 1
    n, s = len(rows), int(lengths.max())
    if int(counts.max()) > 1 or not _are_one(n, int(lengths.min()), s, bytes_a_token):
        return None
    slots = table[rows, :s].long()
    if lengths.min() == s:
        return Call(None, slots.flatten(), None, (n, 1, s))
    mask = torch.from_numpy(np.arange(s) < lengths[:, None])
    slots = torch.where(mask, slots, slots[:, :1])
    return Call(None, slots.flatten(), mask[:, None, None], (n, 1, s))


def _are_one(n: int, shortest: int, longest: int, bytes_a_token: int) -> bool:
    """Return whether n requests of these lengths, with one new token each, fit in one call."""
    return n == 1 or (
        max(shortest, _ALIKE[1]) * 2 > max(longest, _ALIKE[1])
        and n * longest <= _MASKED
        and n * longest * bytes_a_token <= _GATHERED
    )


def pieces(begins: NDArray[np.int64], counts: NDArray[np.int64]) -> tuple[NDArray[np.int64], ...]:
    """Split requests into pieces of at most ``_BLOCK`` new tokens.

    Returns:
        Four arrays, int64 [pieces] each: the request of the piece, the number of tokens before the
        piece, the number of new tokens in the piece, and the row of its first new token.
    """
    parts = -(-counts // _BLOCK)
    which = np.arange(len(counts)).repeat(parts)
    done = (np.arange(len(which)) - (parts.cumsum() - parts).repeat(parts)) * _BLOCK
    first = (counts.cumsum() - counts)[which] + done
    return which, begins[which] + done, np.minimum(counts[which] - done, _BLOCK), first


def _magnitude(values: NDArray[np.int64], least: int) -> NDArray[np.int64]:
    """Return equal numbers for values of about the same size.

    Two values have equal numbers only if one is at most about twice the other, or if both are at
    most ``least``.
    """
    magnitudes: NDArray[np.int64] = np.ceil(np.log2(np.maximum(values, least))).astype(np.int64)
    return magnitudes


def _call(
    table: torch.Tensor,
    rows: torch.Tensor,
    begin: torch.Tensor,
    count: torch.Tensor,
    first: torch.Tensor,
    window: int | None,
    in_order: bool,
) -> Call:
    """Return the call for n pieces.

    Args:
        in_order: whether the pieces are all tokens of the step, in their order.
    """
    begin, count, first = begin[:, None], count[:, None], first[:, None]
    length = begin + count
    q, s = int(count.max()), int(length.max())
    new = torch.minimum(torch.arange(q), count - 1)
    position = (begin + new)[:, :, None]
    context = torch.arange(s)
    mask = context <= position
    if window is not None:
        mask &= context >= position - window
    slots = table[rows, :s].long()
    # Entries of the table after a request's own entries are arbitrary, and may lead to NaN.
    slots = torch.where(context < length, slots, slots[:, :1])
    return Call(
        None if in_order else (first + new).flatten(),
        slots.flatten(),
        None if bool(mask.all()) else mask[:, None],
        (len(rows), q, s),
    )


def attend(
    calls: list[Call],
    query: torch.Tensor,
    output: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float | None,
) -> None:
    """Run the calls.

    Args:
        query: the queries, [tokens, heads, size].
        output: receives the results, [tokens, heads, size].
        keys, values: the KV cache, [slots, KV heads, size].
        scaling: the factor of the products. None means one over the root of the size.
    """
    heads, shared = query.shape[1], keys.shape[1]
    for tokens, slots, mask, (n, q, s), causal in calls:
        asked = query if tokens is None else query.index_select(0, tokens)
        key, value = (
            cache.index_select(0, slots).to(query.dtype).view(n, s, shared, -1).transpose(1, 2)
            for cache in (keys, values)
        )
        if causal:
            asked = asked.transpose(0, 1)[None]
            attended = scaled_dot_product_attention(
                asked, key, value, is_causal=True, scale=scaling, enable_gqa=heads != shared
            )
            attended = attended[0].transpose(0, 1)
        else:
            # Convert heads that share keys to more queries of a single head.
            asked = asked.view(n, q, shared, heads // shared, -1).permute(0, 2, 3, 1, 4)
            asked = asked.reshape(n, shared, heads // shared * q, -1)
            if mask is not None and q > 1:
                mask = mask.repeat(1, 1, heads // shared, 1)
            attended = scaled_dot_product_attention(
                asked, key, value, attn_mask=mask, scale=scaling
            )
            attended = attended.view(n, shared, heads // shared, q, -1).permute(0, 3, 1, 2, 4)
            attended = attended.reshape(n * q, heads, -1)
        if tokens is None:
            output.copy_(attended)
        else:
            # A repeated token has the same result each time.
            output[tokens] = attended
