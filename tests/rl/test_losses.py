"""Losses against loops over tokens, and gradients against theory."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from sglrl import UsageError
from sglrl.rl import (
    importance_ratios,
    kl_estimate,
    masked_mean,
    policy_loss,
    reinforce_loss,
    token_entropies,
    token_logprobs,
)

B, T, V = 4, 6, 11


@pytest.fixture
def batch() -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random)

    mask = torch.rand((B, T), generator=random) < 0.6
    # In this trajectory no token counts.
    mask[2] = False
    return {
        "logprobs": -normal(B, T).abs(),
        "old_logprobs": -normal(B, T).abs(),
        "behavior": -normal(B, T).abs(),
        "advantages": normal(B),
        "mask": mask,
    }


def test_logprobs_and_entropies_stand_at_their_token() -> None:
    random = torch.Generator().manual_seed(1)
    logits = torch.randn((B, T, V), generator=random)
    ids = torch.randint(V, (B, T), generator=random)
    logprobs, entropies = token_logprobs(logits, ids), token_entropies(logits)
    assert logprobs.shape == entropies.shape == (B, T)
    for b in range(B):
        assert logprobs[b, 0] == entropies[b, 0] == 0
        for t in range(1, T):
            weights = np.exp(logits[b, t - 1].double().numpy())
            chances = weights / weights.sum()
            assert logprobs[b, t].item() == pytest.approx(math.log(chances[ids[b, t]]), abs=1e-5)
            assert entropies[b, t].item() == pytest.approx(-(chances * np.log(chances)).sum())
    low = token_logprobs(logits.bfloat16(), ids)
    assert low.dtype == torch.float32


AVERAGES: list[Any] = ["tokens", "sequences", 8]


def averaged(values: dict[tuple[int, int], float], mask: torch.Tensor, average: Any) -> float:
    rows = [[values[b, t] for t in range(T) if mask[b, t]] for b in range(B)]
    if average == "tokens":
        return sum(sum(row) for row in rows) / sum(len(row) for row in rows)
    if average == "sequences":
        return sum(sum(row) / len(row) for row in rows if row) / sum(1 for row in rows if row)
    return sum(sum(row) for row in rows) / (B * average)


@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("clip", [(0.2, 0.28), None])
@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("per_token", [False, True])
def test_policy_loss_token_by_token(
    batch: dict[str, torch.Tensor], average: Any, clip: Any, decoupled: bool, per_token: bool
) -> None:
    if per_token:
        batch["advantages"] = batch["advantages"][:, None] * torch.arange(1, T + 1)
    if not decoupled:
        del batch["behavior"]
    loss, stats = policy_loss(**batch, clip=clip, behavior_cap=1.5, average=average)
    new, old, mask = (batch[k].tolist() for k in ("logprobs", "old_logprobs", "mask"))
    gains, ratios, cut, kl = {}, {}, {}, {}
    for b in range(B):
        for t in range(T):
            advantage = batch["advantages"][b, t] if per_token else batch["advantages"][b]
            a = advantage.item()
            ratio = math.exp(new[b][t] - old[b][t])
            gain = ratio * a
            if clip is not None:
                bounded = min(max(ratio, 1 - clip[0]), 1 + clip[1]) * a
                cut[b, t] = float(bounded < gain)
                gain = min(gain, bounded)
            if decoupled:
                gain *= min(math.exp(old[b][t] - batch["behavior"][b, t].item()), 1.5)
            gains[b, t], ratios[b, t] = gain, ratio
            kl[b, t] = ratio - 1 - math.log(ratio)
    assert any(row for row in mask)
    assert loss.item() == pytest.approx(-averaged(gains, batch["mask"], average), rel=1e-4)
    assert stats.ratio == pytest.approx(averaged(ratios, batch["mask"], "tokens"), rel=1e-4)
    assert stats.kl == pytest.approx(averaged(kl, batch["mask"], "tokens"), rel=1e-4)
    if clip is not None:
        assert stats.clipped == pytest.approx(averaged(cut, batch["mask"], "tokens"))
        assert 0 < stats.clipped < 1


def test_on_the_sampling_policy_all_gradients_are_reinforces(
    batch: dict[str, torch.Tensor],
) -> None:
    """At a ratio of 1 the surrogate's gradient is the policy gradient."""
    advantages, mask = batch["advantages"], batch["mask"]
    gradients = []
    for kind in ("reinforce", "clipped", "unclipped"):
        logprobs = batch["logprobs"].clone().requires_grad_()
        if kind == "reinforce":
            loss = reinforce_loss(logprobs, advantages, mask)
        else:
            clip = (0.2, 0.2) if kind == "clipped" else None
            loss, stats = policy_loss(logprobs, batch["logprobs"], advantages, mask, clip=clip)
            assert stats.ratio == 1
            assert stats.kl == stats.clipped == 0
        (gradient,) = torch.autograd.grad(loss, logprobs)
        gradients.append(gradient)
    assert (gradients[0][mask] != 0).all()
    assert (gradients[0][~mask] == 0).all()
    torch.testing.assert_close(gradients[1], gradients[0])
    torch.testing.assert_close(gradients[2], gradients[0])


def test_reinforce_is_the_gradient_of_the_expected_reward() -> None:
    """In this bandit the number of draws of each arm is proportional to its probability."""
    weights = torch.tensor([1, 2, 3, 4, 6])
    rewards = torch.tensor([0.3, -1.0, 2.0, 0.1, 0.7])
    preferences = (weights / weights.sum()).log().requires_grad_()
    expected = (torch.softmax(preferences, -1) * rewards).sum()
    (exact,) = torch.autograd.grad(expected, preferences)
    arms = torch.repeat_interleave(torch.arange(5), weights)
    # A baseline that does not depend on the arm leaves the gradient unchanged.
    for baseline in (0.0, 0.5):
        ids = torch.stack([torch.zeros_like(arms), arms], 1)
        logits = preferences.expand(len(arms), 2, 5)
        mask = torch.tensor([False, True]).expand(len(arms), 2)
        loss = reinforce_loss(token_logprobs(logits, ids), rewards[arms] - baseline, mask)
        (found,) = torch.autograd.grad(-loss, preferences)
        torch.testing.assert_close(found, exact)


def test_off_policy_samples_give_the_same_gradient_once_weighed() -> None:
    """Another policy draws the arms. The ratio corrects for the difference."""
    drawn = torch.tensor([4, 3, 3, 2, 4])
    behavior = (drawn / drawn.sum()).log()
    preferences = torch.tensor([0.1, 0.5, -0.3, 0.0, 0.8], requires_grad=True)
    rewards = torch.tensor([0.3, -1.0, 2.0, 0.1, 0.7])
    (exact,) = torch.autograd.grad(
        (torch.softmax(preferences, -1) * rewards).sum(), preferences, retain_graph=True
    )
    arms = torch.repeat_interleave(torch.arange(5), drawn)
    logprobs = torch.log_softmax(preferences, -1)[arms][:, None]
    mask = torch.ones_like(logprobs, dtype=torch.bool)
    loss, _ = policy_loss(logprobs, behavior[arms][:, None], rewards[arms], mask, clip=None)
    (found,) = torch.autograd.grad(-loss, preferences)
    torch.testing.assert_close(found, exact)


def test_the_clip_stops_what_has_gone_far_enough() -> None:
    old = torch.zeros(1, 4)
    mask = torch.ones(1, 4, dtype=torch.bool)
    # Ratios of 1.3 and 0.7, each with a positive and a negative advantage.
    logprobs = torch.tensor([[1.3, 1.3, 0.7, 0.7]]).log().requires_grad_()
    advantages = torch.tensor([[1.0, -1.0, 1.0, -1.0]])
    loss, stats = policy_loss(logprobs, old, advantages, mask, clip=(0.2, 0.28))
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert (gradient != 0).tolist() == [[False, True, True, False]]
    assert stats.clipped == 0.5


def test_kl_is_unbiased_and_never_negative() -> None:
    policy = torch.tensor([0.5, 0.3, 0.15, 0.05])
    reference = torch.tensor([0.1, 0.2, 0.3, 0.4])
    estimates = kl_estimate(policy.log()[None], reference.log()[None])[0]
    assert (estimates >= 0).all()
    exact = (policy * (policy / reference).log()).sum()
    torch.testing.assert_close((policy * estimates).sum(), exact)
    assert kl_estimate(policy.log()[None], policy.log()[None]).abs().max() == 0


def test_what_is_masked_does_not_count_whatever_it_is(batch: dict[str, torch.Tensor]) -> None:
    expected, _ = policy_loss(**batch)
    for key in ("logprobs", "old_logprobs", "behavior"):
        for value in (math.nan, -math.inf, 1e30):
            changed = {**batch, key: batch[key].masked_fill(~batch["mask"], value)}
            loss, stats = policy_loss(**changed)
            assert loss.item() == expected.item()
            assert all(math.isfinite(number) for number in stats)
    nothing = torch.zeros(B, T, dtype=torch.bool)
    assert (
        importance_ratios(batch["logprobs"], batch["behavior"], nothing).tolist() == [[1.0] * T] * B
    )
    for average in AVERAGES:
        assert masked_mean(batch["logprobs"], nothing, average).item() == 0


def test_wrong_shapes_are_refused(batch: dict[str, torch.Tensor]) -> None:
    for key in ("old_logprobs", "advantages", "mask", "behavior"):
        with pytest.raises(UsageError, match=rf"must be \[{B}, {T}\]"):
            policy_loss(**{**batch, key: batch[key][:-1]})
    with pytest.raises(UsageError, match="mask must be bool"):
        policy_loss(**{**batch, "mask": batch["mask"].float()})
    with pytest.raises(UsageError, match=r"tokens must be \[b, t\]"):
        kl_estimate(torch.zeros(3), torch.zeros(3))
    with pytest.raises(UsageError, match="logits must be"):
        token_logprobs(torch.zeros(B, T), torch.zeros(B, T, dtype=torch.long))
    with pytest.raises(UsageError, match="logits must be"):
        token_entropies(torch.zeros(B, T))
    with pytest.raises(UsageError, match="average must be"):
        masked_mean(batch["logprobs"], batch["mask"], "mean")  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bits_are_computed_in_thirty_two(dtype: torch.dtype) -> None:
    logprobs = torch.full((64, 2048), -2.0, dtype=dtype)
    mask = torch.ones(64, 2048, dtype=torch.bool)
    assert masked_mean(logprobs, mask).item() == -2
    loss = reinforce_loss(logprobs, torch.ones(64, dtype=dtype), mask)
    assert loss.dtype == torch.float32
    assert loss.item() == 2
    one = torch.tensor([[-100.25, -3.0]]).to(dtype)
    other = torch.tensor([[-99.5, -3.015625]]).to(dtype)
    exact = (one.double() - other.double()).exp().float()
    both = torch.ones(1, 2, dtype=torch.bool)
    torch.testing.assert_close(importance_ratios(one, other, both), exact)
    torch.testing.assert_close(
        kl_estimate(other, one), (exact.log().exp() - 1 - exact.log()), rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize("advantage", [float("nan"), float("inf")])
def test_a_masked_advantage_has_no_gradient(advantage: float) -> None:
    mask = torch.tensor([[True, False]])
    for loss_of in (
        lambda lp, a: reinforce_loss(lp, a, mask),
        lambda lp, a: policy_loss(lp, lp.detach(), a, mask)[0],
    ):
        logprobs = torch.tensor([[-1.0, -1.0]], requires_grad=True)
        loss_of(logprobs, torch.tensor([[1.0, advantage]])).backward()
        assert logprobs.grad.tolist() == [[-1.0, 0.0]]


@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
def test_a_ratio_beyond_all_bounds_has_a_finite_gradient(advantage: float) -> None:
    """exp(100) is inf in float32, and inf times the zero that remains after the clip is NaN."""
    logprobs = torch.tensor([[-0.5, -1.0]], requires_grad=True)
    old = torch.tensor([[-100.5, -1.0]])
    mask = torch.ones(1, 2, dtype=torch.bool)
    loss, _ = policy_loss(logprobs, old, torch.tensor([advantage]), mask)
    loss.backward()  # type: ignore[no-untyped-call]
    assert torch.isfinite(loss)
    assert logprobs.grad is not None
    assert torch.isfinite(logprobs.grad).all()


def test_entropy_of_what_cannot_be_drawn() -> None:
    logits = torch.tensor([[[0.0, 0.0, float("-inf")], [0.0, 0.0, 0.0]]], requires_grad=True)
    entropies = token_entropies(logits)
    torch.testing.assert_close(entropies[0, 1], torch.tensor(2.0).log())
    entropies.sum().backward()
    assert torch.isfinite(logits.grad).all()


def test_what_stands_in_the_padding_is_in_no_gradient() -> None:
    logprobs = torch.tensor([[-1.0, -500.0, -torch.inf, torch.nan]], requires_grad=True)
    reference = torch.tensor([[-2.0, 0.0, -torch.inf, -1.0]])
    mask = torch.tensor([[True, False, False, False]])
    penalty = masked_mean(kl_estimate(logprobs, reference, mask), mask)
    assert penalty.item() == pytest.approx(math.exp(-1) - 1 + 1)
    penalty.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [[pytest.approx(1 - math.exp(-1)), 0, 0, 0]]
