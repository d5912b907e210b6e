"""Policy gradient losses over tokens, and what they are made of."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

import torch
from torch import Tensor

from ..errors import UsageError

Average = Literal["tokens", "sequences"] | int

_MOST_LOG_RATIO: Final = 60.0
"""exp(60) is 1e26, in float32 far from overflow and further from anything to be trained on."""


class PolicyStats(NamedTuple):
    """Of one ``policy_loss``, over the unmasked tokens; plain numbers.

    ratio: mean importance ratio; clipped: share of the tokens whose gradient the clip took away;
    kl: estimate of KL(old || new).
    """

    ratio: float
    clipped: float
    kl: float


def token_logprobs(logits: Tensor, ids: Tensor) -> Tensor:
    """The logprob of each token given those before it.

    Args:
        logits: [b, t, v], as a causal model gives them: position i is about token i + 1.
        ids: int64 [b, t].

    Returns:
        float32 [b, t], in the place of the token. The first is 0: nothing predicts it.
    """
    if logits.dim() != 3 or logits.shape[:2] != ids.shape:
        raise UsageError(
            f"logits must be [b, t, v] and ids [b, t], got {list(logits.shape)} and "
            f"{list(ids.shape)}"
        )
    rows = torch.log_softmax(logits[:, :-1].float(), dim=-1)
    chosen = rows.gather(2, ids[:, 1:, None]).squeeze(2)
    return torch.nn.functional.pad(chosen, (1, 0))


def token_entropies(logits: Tensor) -> Tensor:
    """float32 [b, t]: entropy, in nats, of the distribution that each token was drawn from. In the
    place of the token, as ``token_logprobs``; the first is 0."""
    if logits.dim() != 3:
        raise UsageError(f"logits must be [b, t, v], got {list(logits.shape)}")
    rows = torch.log_softmax(logits[:, :-1].float(), dim=-1)
    # What cannot be drawn adds nothing.
    finite = rows.masked_fill(rows == float("-inf"), 0.0)
    return torch.nn.functional.pad(-(rows.exp() * finite).sum(-1), (1, 0))


def importance_ratios(logprobs: Tensor, behavior: Tensor, mask: Tensor) -> Tensor:
    """float32 [b, t]: how much likelier a token is to the policy that is trained than it was to the
    one that sampled it, whose logprobs ``behavior`` are. 1 where ``mask`` is False."""
    _same_shape(logprobs, behavior=behavior, mask=mask)
    # Masked before the exponential: what stands in the padding must not become inf or NaN. And
    # bounded, as inf times an advantage of 0, or in a gradient that the clip takes away, is NaN.
    difference = (_wide(logprobs) - _wide(behavior)).masked_fill(~mask, 0.0)
    return difference.clamp(max=_MOST_LOG_RATIO).exp()


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
    """The clipped surrogate of PPO (arXiv:1707.06347, equation 7), as a loss.

    Args:
        logprobs: [b, t], of the policy that is trained; has a gradient.
        old_logprobs: [b, t], of the policy that the clip holds on to. Usually ``logprobs`` of the
            trajectories: the one that sampled.
        advantages: [b], the same for all tokens of a trajectory (GRPO), or [b, t].
        mask: bool [b, t]: tokens that count, ``loss_mask``.
        clip: how far the ratio may be below and above 1; the upper one larger, so that unlikely
            tokens can become likely (DAPO, arXiv:2503.14476). None: no clip.
        behavior: [b, t], logprobs of the policies that sampled, when the clip is around another
            one that is nearer to the trained one, ``old_logprobs``. Each token is then weighed by
            old / behavior: the decoupled loss of AReaL, arXiv:2505.24298.
        behavior_cap: that weight is at most this.
        average: see ``masked_mean``.

    Returns:
        The loss, a scalar to be minimised, and statistics.

    Raises:
        UsageError: wrong shapes.
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
    """Its gradient is that of REINFORCE (Williams, 1992): for tokens that the very policy sampled
    that is trained.

    Args: as ``policy_loss``.
    """
    if advantages.shape == logprobs.shape[:1]:
        advantages = advantages[:, None].expand_as(logprobs)
    _same_shape(logprobs, advantages=advantages, mask=mask)
    # Masked before the product: its gradient must not become NaN by what stands in the padding.
    gains = _wide(logprobs).masked_fill(~mask, 0.0) * _wide(advantages).masked_fill(~mask, 0.0)
    return -masked_mean(gains, mask, average)


def kl_estimate(logprobs: Tensor, reference: Tensor, mask: Tensor | None = None) -> Tensor:
    """[b, t]: per token, an estimate of KL(policy || reference) for tokens that the policy sampled.
    Never negative and, as its expectation, exact: "k3" of http://joschu.net/blog/kl-approx.html.

    0 where ``mask`` is False. As a part of a loss it needs one: ``masked_mean`` leaves values out,
    but not the NaN that is the gradient of what stands in the padding."""
    _same_shape(logprobs, reference=reference)
    difference = _wide(reference) - _wide(logprobs)
    if mask is not None:
        _same_shape(logprobs, mask=mask)
        difference = difference.masked_fill(~mask, 0.0)
    return difference.clamp(max=_MOST_LOG_RATIO).exp() - 1 - difference


def masked_mean(values: Tensor, mask: Tensor, average: Average = "tokens") -> Tensor:
    """A scalar: the mean of [b, t] values over the tokens that count.

    Args:
        average: "tokens": over all of them, each weighs the same (DAPO). "sequences": first within
            each trajectory, then over the trajectories that have any (GRPO); those in long ones
            weigh less. A number: the sum over b times this many tokens, whatever the lengths (Dr.
            GRPO).
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
    """In float32 at least: sums and differences in 16 bits are off, or overflow."""
    return values if values.dtype == torch.float64 else values.float()


def _same_shape(first: Tensor, **others: Tensor) -> None:
    if first.dim() != 2:
        raise UsageError(f"tokens must be [b, t], got {list(first.shape)}")
    for name, other in others.items():
        if other.shape != first.shape:
            raise UsageError(f"{name} must be {list(first.shape)}, got {list(other.shape)}")
        if name == "mask" and other.dtype != torch.bool:
            raise UsageError(f"mask must be bool, not {other.dtype}")
