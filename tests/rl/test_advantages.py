"""Advantages against loops that say the same one number at a time."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sglrl import UsageError
from sglrl.rl import group_advantages, has_signal, leave_one_out

REWARDS = np.random.default_rng(3).normal(size=(5, 7)).astype(np.float32)


@pytest.mark.parametrize("normalize", [True, False])
def test_group_advantages_are_each_groups_own(normalize: bool) -> None:
    found = group_advantages(REWARDS, normalize=normalize, epsilon=1e-3)
    for g, rewards in enumerate(REWARDS.tolist()):
        mean = sum(rewards) / len(rewards)
        spread = (sum((r - mean) ** 2 for r in rewards) / len(rewards)) ** 0.5
        for i, reward in enumerate(rewards):
            expected = (reward - mean) / (spread + 1e-3) if normalize else reward - mean
            assert found[g, i].item() == pytest.approx(expected, abs=1e-5)
    assert found.dtype == torch.float32
    torch.testing.assert_close(
        group_advantages(REWARDS[2], normalize=normalize, epsilon=1e-3), found[2]
    )


def test_leave_one_out_is_the_mean_of_the_others() -> None:
    found = leave_one_out(REWARDS)
    for g, rewards in enumerate(REWARDS.tolist()):
        for i, reward in enumerate(rewards):
            others = rewards[:i] + rewards[i + 1 :]
            expected = reward - sum(others) / len(others)
            assert found[g, i].item() == pytest.approx(expected, abs=1e-5)


def test_equal_rewards_say_nothing() -> None:
    assert group_advantages([0.5] * 6).tolist() == [0.0] * 6
    assert leave_one_out([0.5] * 6).tolist() == [0.0] * 6
    for rewards, signal in (([], False), ([1.0], False), ([1, 1], False), ([0, 1], True)):
        assert has_signal(SimpleNamespace(rewards=np.array(rewards))) is signal


@pytest.mark.parametrize("wrong", [1.0, [], np.zeros((2, 2, 2))])
def test_wrong_shapes_are_refused(wrong: object) -> None:
    with pytest.raises(UsageError, match="rewards must be"):
        group_advantages(wrong)
    with pytest.raises(UsageError, match="n of at least 2"):
        leave_one_out([1.0])
