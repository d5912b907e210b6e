"""Advantages against loops that compute the same values one by one."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sglrl import UsageError
from sglrl.rl import group_advantages, has_signal, leave_one_out, turn_advantages

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


def by_turn(rewards: list[list[float]], width: int, left: bool) -> tuple[torch.Tensor, ...]:
    """Return rewards and turn ids laid out as by ``stack``.

    Each turn has two tokens. Before each turn is one token that belongs to no turn.
    """
    values, turn_ids = torch.zeros(len(rewards), width), torch.full((len(rewards), width), -1)
    for row, earned in enumerate(rewards):
        begin = width - 3 * len(earned) if left else 0
        for turn, reward in enumerate(earned):
            turn_ids[row, begin + 3 * turn + 1 : begin + 3 * turn + 3] = turn
            values[row, begin + 3 * turn + 2] = reward
    return values, turn_ids


@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("normalize", [True, False])
def test_a_turns_advantage_is_over_the_same_turn_of_its_group(normalize: bool, left: bool) -> None:
    chance = np.random.default_rng(5)
    sizes = [4, 1, 6, 3]
    # A trajectory may have no turns.
    rewards = [chance.normal(size=chance.integers(0, 4)).tolist() for _ in range(sum(sizes))]
    rewards[4] = [1.0, 2.0]
    values, turn_ids = by_turn(rewards, 10, left)
    found = turn_advantages(values, turn_ids, sizes, normalize=normalize, epsilon=1e-3)
    assert found.dtype == torch.float32
    assert not found[turn_ids < 0].any()
    assert not found[4].any()
    begin = 0
    for size in sizes:
        for row in range(begin, begin + size):
            for turn in range(len(rewards[row])):
                of_all = [sum(r[turn:]) for r in rewards[begin : begin + size] if len(r) > turn]
                mean = sum(of_all) / len(of_all)
                spread = (sum((r - mean) ** 2 for r in of_all) / len(of_all)) ** 0.5
                expected = sum(rewards[row][turn:]) - mean
                expected /= spread + 1e-3 if normalize else 1
                at = found[row][turn_ids[row] == turn]
                assert at.tolist() == pytest.approx([expected] * 2, abs=1e-5)
        begin += size


def test_of_single_turns_it_is_the_groups() -> None:
    values, turn_ids = by_turn([[r] for r in REWARDS.flatten().tolist()], 3, False)
    found = turn_advantages(values, turn_ids, [7] * 5)
    torch.testing.assert_close(found[:, 1], group_advantages(REWARDS).flatten())


def test_a_batch_that_is_not_its_groups_is_refused() -> None:
    values, turn_ids = by_turn([[1.0], [2.0]], 3, False)
    with pytest.raises(UsageError, match=r"groups of \[3\] are not a batch of 2"):
        turn_advantages(values, turn_ids, [3])
    with pytest.raises(UsageError, match=r"must be \[b, t\]"):
        turn_advantages(values, turn_ids[:, 1:], [2])


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


@pytest.mark.parametrize(("reward", "count"), [(0.1, 11), (1.1, 10), (100.1, 11), (1000.1, 30)])
def test_equal_rewards_are_exactly_no_advantage(reward: float, count: int) -> None:
    """The advantage is zero even if the rewards' mean is rounded.

    Otherwise the rounding error would be divided by itself.
    """
    rewards = [reward] * count
    assert not group_advantages(rewards).any()
    assert not group_advantages([rewards, rewards], normalize=False).any()
    assert not leave_one_out(rewards).any()
    values, turn_ids = by_turn([[reward]] * count + [[1.0]], 3, False)
    assert not turn_advantages(values, turn_ids, [count, 1]).any()


def test_who_asks_for_the_signal_of_a_list_is_told() -> None:
    with pytest.raises(UsageError, match="takes a group, with its rewards, not list"):
        has_signal([0.0, 1.0])  # type: ignore[arg-type]
