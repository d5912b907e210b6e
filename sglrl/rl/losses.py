"""Policy gradient losses over tokens, and the functions that they use."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

import torch
from torch import Tensor

from ..errors import UsageError

Average = Literal["tokens", "sequences"] | int

_MAX_LOG_RATIO: Final = 60.0
"""Upper bound of log ratios. exp(60) is 1e26, far below the maximum of float32 and far above useful
ratios."""


class PolicyStats(NamedTuple):
    """The statistics of one ``policy_loss`` over the unmasked tokens, as plain numbers.

    Attributes:
        ratio: mean importance ratio.
        clipped: share of the tokens whose gradient is 0 because of the clip.
        kl: estimate of KL(old || new).
    """

    ratio: float
    clipped: float
    kl: float


def token_logprobs(logits: Tensor, ids: Tensor) -> Tensor:
    """Return the logprob of each token given the tokens before it.

    Args:
        logits: [b, t, v] for a vocabulary of v tokens, the output of a causal model. Position i
            predicts token i + 1.
        ids: int64 [b, t], the tokens.

    Returns:
        float32 [b, t], each value at the position of its token. The value of the first token is 0,
        because no logits predict it.

    Raises:
        UsageError: shapes are wrong.
    """
    if logits.dim() != 3 or logits.shape[:2] != ids.shape:
        raise UsageError(
            f"logits must be [b, t, v] and ids [b, t], got {list(logits.shape)} and "
            f"{list(ids.shape)}"
        )
    rows = torch.log_softmax(logits[:, :-1].float(), dim=-1)
    chosen = rows.gather(2, ids[:, 1:, None]).squeeze(2)
    return torch.nn.functional.pad(chosen, (1, 0))


def apply_sampling_mask(logits: Tensor, mask_ids: Tensor, mask_lengths: Tensor) -> Tensor:
    """Return the logits with -inf for the tokens that could not be drawn.

    First divide the logits by the sampling temperature. ``token_logprobs`` of the result are then
    the logprobs of the distribution from which the tokens were drawn ("processed_logprobs"). If
    top-p, top-k or min-p limit sampling and the mask is not applied, the trained policy differs
    from the policy that sampled.

    Args:
        logits: [b, t, v], as in ``token_logprobs``.
        mask_ids: int64 [b, m], padded with -1, from ``sglrl.rollouts.stack``.
        mask_lengths: int64 [b, t], the number of ``mask_ids`` of each token, also from ``stack``.
            If a token has none, its logits do not change.

    Raises:
        UsageError: shapes are wrong, or ids and lengths do not belong together.
    """
    if logits.dim() != 3 or logits.shape[:2] != mask_lengths.shape:
        raise UsageError(
            f"logits must be [b, t, v] and mask_lengths [b, t], got {list(logits.shape)} and "
            f"{list(mask_lengths.shape)}"
        )
    lengths = mask_lengths.flatten()
    ids = mask_ids[mask_ids >= 0]
    if len(ids) != int(lengths.sum()) or mask_lengths[:, :1].any():
        raise UsageError("mask_ids and mask_lengths do not belong together")
    # The logits of a token are at the position before it, in the same row.
    rows = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths) - 1
    out = torch.nn.functional.pad(mask_lengths[:, 1:] > 0, (0, 1)).flatten()[:, None]
    out = out.repeat(1, logits.shape[2]).index_put((rows, ids), out.new_tensor(False))
    return logits.masked_fill(out.view(logits.shape), float("-inf"))


def token_entropies(logits: Tensor) -> Tensor:
    """Return the entropy, in nats, of the distribution of each token.

    Args:
        logits: [b, t, v], as in ``token_logprobs``.

    Returns:
        float32 [b, t], each value at the position of its token. The value of the first token is 0.

    Raises:
        UsageError: the logits have a wrong shape.
    """
    if logits.dim() != 3:
        raise UsageError(f"logits must be [b, t, v], got {list(logits.shape)}")
    rows = torch.log_softmax(logits[:, :-1].float(), dim=-1)
    # A token of probability 0 adds nothing, and 0 * -inf would be NaN.
    finite = rows.masked_fill(rows == float("-inf"), 0.0)
    return torch.nn.functional.pad(-(rows.exp() * finite).sum(-1), (1, 0))


def importance_ratios(logprobs: Tensor, behavior: Tensor, mask: Tensor) -> Tensor:
    """Return the ratio of each token's probabilities under the trained and the sampling policy.

    Args:
        logprobs: [b, t], the logprobs of the trained policy.
        behavior: [b, t], the logprobs of the policy that sampled the tokens.
        mask: bool [b, t], the tokens that count.

    Returns:
        [b, t], float32 (float64 for float64 inputs). The ratio is 1 where ``mask`` is False.
    """
    _same_shape(logprobs, behavior=behavior, mask=mask)
    # Mask before the exponential, so that values in the padding do not become inf or NaN. Bound
    # the ratio: the advantages and gradients by which it is multiplied can be 0, and inf times 0 is
    # NaN.
    difference = (_wide(logprobs) - _wide(behavior)).masked_fill(~mask, 0.0)
    return difference.clamp(max=_MAX_LOG_RATIO).exp()


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip: tuple[float, float] | None = (0.2, 0.28),
    behavior: Tensor | None = None,
    behavior_cap: float = 5.0,
    average: Average = "tokens",
) -> tuple[Tensor, PolicyStats]:
    """Return the clipped surrogate of PPO (arXiv:1707.06347, equation 7) as a loss.

    Args:
        logprobs: [b, t], the logprobs of the trained policy, with a gradient.
        old_logprobs: [b, t], the logprobs of the policy to which the clip is relative. Usually this
            policy sampled the tokens, so pass the ``logprobs`` of the trajectories.
        advantages: [b], equal for all tokens of a trajectory (GRPO), or [b, t].
        mask: bool [b, t], the tokens that count. Pass ``loss_mask``.
        clip: how far the ratio may be below and above 1. By default, the upper bound is larger, so
            that unlikely tokens can become likely (DAPO, arXiv:2503.14476). None: no clip.
        behavior: [b, t], the logprobs of the policies that sampled. Pass them if ``old_logprobs``
            are of another policy, which is closer to the trained policy. Each token is then
            weighted by old / behavior, as in the decoupled loss of AReaL (arXiv:2505.24298).
        behavior_cap: upper bound of the weight old / behavior.
        average: see ``masked_mean``.

    Returns:
        The loss, a scalar to be minimised, and statistics.

    Raises:
        UsageError: shapes are wrong.
    """
    if advantages.shape == logprobs.shape[:1]:
        advantages = advantages[:, None].expand_as(logprobs)
    _same_shape(logprobs, old_logprobs=old_logprobs, advantages=advantages, mask=mask)
    ratios = importance_ratios(logprobs, old_logprobs.detach(), mask)
    gains = ratios * advantages
    clipped = torch.zeros_like(mask)
    if clip is not None:
        low, high = clip
        bounded = ratios.clamp(1 - low, 1 + high) * advantages
        clipped = bounded < gains
        gains = torch.minimum(gains, bounded)
    if behavior is not None:
        weights = importance_ratios(old_logprobs.detach(), behavior, mask)
        gains = gains * weights.clamp(max=behavior_cap)
    loss = -masked_mean(gains, mask, average)
    with torch.no_grad():
        stats = PolicyStats(
            ratio=float(masked_mean(ratios, mask)),
            clipped=float(masked_mean(clipped.float(), mask)),
            kl=float(masked_mean(kl_estimate(old_logprobs, logprobs, mask), mask)),
        )
    return loss, stats


def reinforce_loss(
    logprobs: Tensor, advantages: Tensor, mask: Tensor, *, average: Average = "tokens"
) -> Tensor:
    """Return a loss with the gradient of REINFORCE (Williams, 1992).

    The trained policy itself must have sampled the tokens.

    Args:
        logprobs, advantages, mask, average: as in ``policy_loss``.

    Raises:
        UsageError: shapes are wrong.
    """
    if advantages.shape == logprobs.shape[:1]:
        advantages = advantages[:, None].expand_as(logprobs)
    _same_shape(logprobs, advantages=advantages, mask=mask)
    # Mask before the product, so that values in the padding do not make the gradient NaN.
    gains = _wide(logprobs).masked_fill(~mask, 0.0) * _wide(advantages).masked_fill(~mask, 0.0)
    return -masked_mean(gains, mask, average)


def kl_estimate(logprobs: Tensor, reference: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return an estimate of KL(policy || reference), [b, t], for each token the policy sampled.

    The estimate is unbiased and never negative. It is "k3" of
    http://joschu.net/blog/kl-approx.html.

    Args:
        logprobs: [b, t], the logprobs of the policy.
        reference: [b, t], the logprobs of the reference policy.
        mask: bool [b, t], the tokens that count. Elsewhere the result is 0. Pass a mask if the
            estimate is part of a loss: ``masked_mean`` ignores values in the padding, but not NaN
            in the gradients of these values.
    """
    _same_shape(logprobs, reference=reference)
    difference = _wide(reference) - _wide(logprobs)
    if mask is not None:
        _same_shape(logprobs, mask=mask)
        difference = difference.masked_fill(~mask, 0.0)
    return difference.clamp(max=_MAX_LOG_RATIO).exp() - 1 - difference


def masked_mean(values: Tensor, mask: Tensor, average: Average = "tokens") -> Tensor:
    """Return the mean of [b, t] values over the unmasked tokens, as a scalar.

    Args:
        values: [b, t], the values.
        mask: bool [b, t], the tokens that count.
        average: "tokens": the mean over all unmasked tokens, with equal weights (DAPO).
            "sequences": the mean within each trajectory, then the mean over the trajectories with
            unmasked tokens (GRPO). Tokens of long trajectories then weigh less. A number n: the
            sum divided by b times n, regardless of the lengths (Dr. GRPO).

    Raises:
        UsageError: shapes are wrong, or ``average`` is unknown.
    """
    _same_shape(values, mask=mask)
    kept = _wide(values).masked_fill(~mask, 0.0)
    if average == "tokens":
        return kept.sum() / mask.sum().clamp(min=1)
    if average == "sequences":
        lengths = mask.sum(-1)
        return (kept.sum(-1) / lengths.clamp(min=1)).sum() / (lengths > 0).sum().clamp(min=1)
    if isinstance(average, int) and average > 0:
        return kept.sum() / (len(values) * average)
    raise UsageError(
        f"average must be 'tokens', 'sequences' or a number of tokens, got {average!r}"
    )


def _wide(values: Tensor) -> Tensor:
    """Return the values in at least float32. In 16 bits, sums are inexact or overflow."""
    return values if values.dtype == torch.float64 else values.float()


def _same_shape(first: Tensor, **others: Tensor) -> None:
    if first.dim() != 2:
        raise UsageError(f"tokens must be [b, t], got {list(first.shape)}")
    for name, other in others.items():
        if other.shape != first.shape:
            raise UsageError(f"{name} must be {list(first.shape)}, got {list(other.shape)}")
        if name == "mask" and other.dtype != torch.bool:
            raise UsageError(f"mask must be bool, not {other.dtype}")
