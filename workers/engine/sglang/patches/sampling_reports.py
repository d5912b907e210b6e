"""Report the tokens that could be drawn, and logprobs of other distributions than SGLang's.

SGLang's own ``return_sampling_mask`` (0.5.17 to 0.5.23) rejects top-p without top-k. Version 0.5.17
waits for the GPU in every step. Version 0.5.23 ends a request if the mask has too many tokens, or
if the request has a seed, because SGLang does not know how ``seeded_sampling`` draws a token.

In this module, one function (``limited``) limits the probabilities. The draw, the tokens that could
be drawn and their logprobs all use its result, so they always agree. A batch without reports has no
extra computation.
"""

from __future__ import annotations

import weakref
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from sglang.srt.layers import sampler as theirs
from sglang.srt.layers.sampler import Sampler
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

from sglrl.errors import EngineError
from sglrl.inference.sampling import PROCESSED_LOGPROBS, RAW_LOGPROBS

from ..commands import Report
from ..patch import Setup
from .seeded_sampling import limited, row_blocks
from .undrawable_tokens import await_step, to_host

_WORD: Final = 64
"""The number of bits of a packed row is a multiple of this."""

_alive: weakref.WeakSet[Any] = weakref.WeakSet()
"""SGLang's requests that have a report."""


class Rows(NamedTuple):
    """The rows of a batch that have reports.

    Attributes:
        raw: rows whose logprobs are the logprobs of the model's logits.
        limited: rows that need the limited distribution: first the rows in ``packed``, then the
            other rows in ``processed``.
        packed: rows that need a bit for each drawable token: first the rows in ``masks``, then the
            other rows in ``processed`` whose requests ask for the logprobs of given token ids.
        masks: rows whose drawable tokens are reported.
        processed: rows whose logprobs are the logprobs of the limited distribution.
        processed_at: the index in ``limited`` of each row in ``processed``.
    """

    raw: list[int]
    limited: list[int]
    packed: list[int]
    masks: list[int]
    processed: list[int]
    processed_at: list[int]


class Limited(NamedTuple):
    """The limited distributions of the k rows in ``Rows.limited``.

    Attributes:
        total: float32 [k], the logarithm of the total probability of all drawable tokens.
        count: int64 [k], the number of drawable tokens.
        bits: uint8 [packed, bytes], one bit for each token of the vocabulary, for the rows in
            ``Rows.packed``.
    """

    total: torch.Tensor
    count: torch.Tensor
    bits: torch.Tensor


def install(setup: Setup) -> None:
    """Patch SGLang's sampler.

    Raises:
        EngineError: an environment variable changes the logprobs of all requests.
    """
    if theirs.SGLANG_RETURN_ORIGINAL_LOGPROB:
        raise EngineError(
            "SGLANG_RETURN_ORIGINAL_LOGPROB is not supported: unset it, and ask for "
            'logprobs_mode="raw_logprobs" in the requests'
        )
    _patch_info()
    _patch_sampler()


def ask(request: Any, report: Report) -> None:
    """Set the report of one of SGLang's requests."""
    request.sglrl_report = report
    _alive.add(request)


def any_alive() -> bool:
    """Return whether a request with a report is alive."""
    return bool(_alive)


def attach(batch: Any) -> None:
    """Record the rows that have reports in a batch that is about to run."""
    info = batch.sampling_info
    if info is None:
        return
    info.sglrl_reports = _rows(batch.reqs) if _alive else None


def _rows(requests: list[Any]) -> Rows | None:
    wanted = [
        (i, request.sglrl_report)
        for i, request in enumerate(requests)
        if hasattr(request, "sglrl_report")
    ]
    raw = [i for i, report in wanted if report.logprobs_mode == RAW_LOGPROBS]
    masks = [i for i, report in wanted if report.mask]
    processed = [i for i, report in wanted if report.logprobs_mode == PROCESSED_LOGPROBS]
    given = [i for i in processed if requests[i].logprob.token_ids_logprob is not None]
    packed = [*masks, *(i for i in given if i not in masks)]
    rows = [*packed, *(i for i in processed if i not in packed)]
    if not raw and not rows:
        return None
    return Rows(raw, rows, packed, masks, processed, [rows.index(i) for i in processed])


def _patch_info() -> None:
    bias = SamplingBatchInfo.apply_logits_bias

    def keep_raw(self: Any, logits: torch.Tensor) -> None:
        rows = self.sglrl_reports
        if rows is not None and rows.raw:
            self.sglrl_raw = logits.index_select(0, _index(rows.raw, logits))
        bias(self, logits)

    copied = SamplingBatchInfo.copy_for_forward

    def copy_with_reports(self: Any) -> Any:
        made = copied(self)
        made.sglrl_reports = self.sglrl_reports
        return made

    SamplingBatchInfo.sglrl_reports = None
    SamplingBatchInfo.sglrl_raw = None
    SamplingBatchInfo.sglrl_limited = None
    SamplingBatchInfo.apply_logits_bias = keep_raw
    SamplingBatchInfo.copy_for_forward = copy_with_reports


def _patch_sampler() -> None:
    draw = Sampler._sample_from_probs

    def sample(
        self: Any, probs: torch.Tensor, info: Any, positions: torch.Tensor, simple: bool
    ) -> Any:
        drawn = draw(self, probs, info, positions, simple)
        rows = info.sglrl_reports
        if rows is not None and rows.limited:
            ids = drawn[0] if isinstance(drawn, tuple) else drawn
            info.sglrl_limited = _limit(probs, info, rows, ids, simple)
        return drawn

    forward = Sampler.forward

    def with_reports(
        self: Any,
        output: Any,
        info: Any,
        return_logprob: bool,
        top: Any,
        given: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Sample, and set ``output.sglrl_masks``: the rows and their bits on the host, or None.

        Args:
            top: for each row, the number of likeliest tokens whose logprobs are reported.
            given: for each row, the token ids whose logprobs are reported, or None.
        """
        ids = forward(self, output, info, return_logprob, top, given, *args, **kwargs)
        output.sglrl_masks = None
        if return_logprob and any(tokens is not None for tokens in given):
            # For rows without token ids, 0.5.17 writes lists, but later expects tensors.
            none = ids.new_empty(0)
            values = output.next_token_token_ids_logprobs_val
            for row, tokens in enumerate(given):
                if tokens is None:
                    values[row] = none
        rows = info.sglrl_reports
        if rows is None:
            return ids
        limited, info.sglrl_limited = info.sglrl_limited, None
        raw, info.sglrl_raw = info.sglrl_raw, None
        if return_logprob:
            # With ``rl_on_policy_target``, SGLang's own logprobs have 16 bits.
            output.next_token_logprobs = output.next_token_logprobs.float()
        bits = None
        if rows.packed:
            columns = output.next_token_logits.shape[1]
            bits = _with_drawn(limited, ids.index_select(0, _index(rows.packed, ids)), columns)
        if return_logprob and rows.raw:
            _write_raw(output, ids, rows.raw, raw, top, given)
        if return_logprob and rows.processed:
            _write_processed(output, rows, limited, bits, top, given)
        if rows.masks:
            assert bits is not None
            output.sglrl_masks = rows.masks, to_host(bits[: len(rows.masks)])
        return ids

    Sampler._sample_from_probs = sample
    Sampler.forward = with_reports


def _index(rows: list[int], like: torch.Tensor) -> torch.Tensor:
    # Pin the memory, because a copy from pageable memory would wait for the GPU.
    index = torch.tensor(rows, dtype=torch.int64, pin_memory=like.is_cuda)
    return index.to(like.device, non_blocking=True)


def _limit(probs: torch.Tensor, info: Any, rows: Rows, ids: torch.Tensor, simple: bool) -> Limited:
    """Limit the distributions of the rows in ``rows.limited``, and draw their tokens again.

    SGLang's samplers round differently, so the token that they drew may be outside of the limits.
    A token that was drawn with a seed stays, because the seeded draw uses the same limits.

    Args:
        ids: the drawn tokens of all rows, changed in place.
    """
    at = _index(rows.limited, probs)
    limits = None
    if not simple:
        limits = [values.index_select(0, at) for values in (info.top_ks, info.top_ps, info.min_ps)]
    totals, counts, bits, drawn = [], [], [], []
    for block in row_blocks(len(rows.limited), probs.shape[1], True):
        weights = probs.index_select(0, at[block])
        weights = limited(weights, *(v[block] for v in limits)) if limits else weights.double()
        drawable = weights > 0
        totals.append(weights.sum(-1).log().float())
        counts.append(drawable.sum(-1))
        drawn.append(torch.multinomial(weights, 1)[:, 0])
        if block.start < len(rows.packed):
            bits.append(_pack(drawable))
    ours = torch.cat(drawn).to(ids.dtype)
    if info.sampling_seed is not None:
        seeded = info.sampling_seed.index_select(0, at) >= 0
        ours = torch.where(seeded, ids.index_select(0, at), ours)
    ids.index_copy_(0, at, ours)
    packed = torch.cat(bits)[: len(rows.packed)] if bits else ids.new_empty(0)
    return Limited(torch.cat(totals), torch.cat(counts), packed)


def _pack(drawable: torch.Tensor) -> torch.Tensor:
    """Pack bool [n, vocabulary] to uint8 [n, bytes], with the first token in the lowest bit."""
    columns = drawable.shape[1]
    padded = torch.nn.functional.pad(drawable, (0, -columns % _WORD)).view(len(drawable), -1, 8)
    powers = 1 << torch.arange(8, dtype=torch.uint8, device=drawable.device)
    return (padded * powers).sum(-1, dtype=torch.uint8)


def _with_drawn(limited: Limited | None, drawn: torch.Tensor, columns: int) -> torch.Tensor:
    """Return the bits of the packed rows, including the drawn tokens.

    Tensor-parallel ranks may agree on a token that rounding excludes on this rank.

    Args:
        limited: the limited rows. None if SGLang took the top token of every row.
        drawn: the tokens drawn in these rows.
    """
    if limited is None:
        bits = torch.zeros(
            (len(drawn), -(-columns // _WORD) * _WORD // 8), dtype=torch.uint8, device=drawn.device
        )
    else:
        bits = limited.bits
    drawn = drawn.long()[:, None]
    byte = drawn >> 3
    own = (1 << (drawn & 7)).to(torch.uint8)
    return bits.scatter(1, byte, bits.gather(1, byte) | own)


def _write_raw(
    output: Any,
    ids: torch.Tensor,
    rows: list[int],
    logits: torch.Tensor,
    top: list[int],
    given: list[list[int] | None],
) -> None:
    """Replace the logprobs of rows by the logprobs of the model's unprocessed logits."""
    at = _index(rows, ids)
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    drawn = ids.index_select(0, at).long()[:, None]
    output.next_token_logprobs.index_copy_(0, at, logprobs.gather(1, drawn)[:, 0])
    for row, own in zip(rows, logprobs, strict=True):
        if top[row]:
            values, tokens = own.topk(top[row])
            output.next_token_top_logprobs_val[row] = values
            output.next_token_top_logprobs_idx[row] = tokens
        if wanted := given[row]:
            output.next_token_token_ids_logprobs_val[row] = own[_index(wanted, own)]


def _write_processed(
    output: Any,
    rows: Rows,
    limited: Limited | None,
    bits: torch.Tensor | None,
    top: list[int],
    given: list[list[int] | None],
) -> None:
    """Replace the logprobs of rows by the logprobs of the limited distribution.

    Limits remove the least likely tokens, so the order of the likeliest tokens does not change.

    Args:
        bits: the bits of the rows in ``rows.packed``, including the drawn tokens.
    """
    logprobs = output.next_token_logprobs
    at = _index(rows.processed, logprobs)
    before = logprobs.index_select(0, at)
    if limited is None:
        total, count = before, torch.ones_like(before)
    else:
        where = _index(rows.processed_at, logprobs)
        total, count = limited.total.index_select(0, where), limited.count.index_select(0, where)
    # If only one token is drawable, rounding may leave a small difference from 0.
    logprobs.index_copy_(0, at, (before - total).clamp_(max=0).masked_fill_(count == 1, 0.0))
    for row, place, own, most in zip(rows.processed, rows.processed_at, total, count, strict=True):
        if top[row]:
            values = output.next_token_top_logprobs_val[row]
            inside = torch.arange(len(values), device=values.device) < most
            output.next_token_top_logprobs_val[row] = _within(values, inside, own, most)
        if wanted := given[row]:
            assert bits is not None
            tokens = _index(wanted, bits)
            inside = (bits[place].index_select(0, tokens >> 3) >> (tokens & 7)) & 1 == 1
            values = output.next_token_token_ids_logprobs_val[row]
            output.next_token_token_ids_logprobs_val[row] = _within(values, inside, own, most)


def _within(
    values: torch.Tensor, inside: torch.Tensor, total: torch.Tensor, count: torch.Tensor
) -> torch.Tensor:
    """Return logprobs in a limited distribution. A token that is not drawable gets the minimum.

    Args:
        values: the logprobs of the tokens before the limits.
        inside: whether each token is drawable.
        total, count: the fields of ``Limited`` for this row.
    """
    least = torch.finfo(values.dtype).min
    return torch.where(inside, (values - total).clamp(max=0).masked_fill(count == 1, 0.0), least)


def collect(batch: Any, result: Any, adapter: Any) -> None:
    """Pass the drawable tokens of a step to the adapter, before SGLang processes the step."""
    masks = getattr(getattr(result, "logits_output", None), "sglrl_masks", None)
    if masks is None:
        return
    await_step(result)
    rows, bits = masks
    for row, ids in zip(rows, unpacked(bits.numpy()), strict=True):
        request = batch.reqs[row]
        adapter.drawable(request.rid, len(request.output_ids), ids)


def unpacked(bits: NDArray[np.uint8]) -> list[NDArray[np.int32]]:
    """Return the tokens of each row of packed bits, in ascending order."""
    words = bits.view("<u8")
    row, word = np.nonzero(words)
    spread = np.unpackbits(words[row, word].view(np.uint8), bitorder="little").reshape(-1, _WORD)
    which, bit = np.nonzero(spread)
    ids = (word[which] * _WORD + bit).astype("<i4")
    counts = np.bincount(row[which], minlength=len(bits))
    return np.split(ids, counts.cumsum()[:-1])
