"""Rewards of turns, calls and trajectories, with names and weights."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

import sglrl
from sglrl import Reward
from sglrl.inference.message import AssistantMessage, ToolCall
from sglrl.rollouts import load, save, stack, to_jsonl

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client() -> AsyncIterator[sglrl.Client]:
    async with sglrl.launch("fake", engine="fake") as client:
        yield client


def session_of(client: sglrl.Client, **options: Any) -> sglrl.Session:
    return client.session(input_ids=[1, 2, 3], max_new_tokens=2, **options)


async def test_names_and_weights(client: sglrl.Client, tmp_path: Path) -> None:
    async with session_of(client, reward_weights={"format": 0.5, "seen": 0}) as session:
        assert not session.rewarded
        await session.generate()
        session.reward(1)
        session.reward(2, "format")
        session.reward({"seen": 7, "kind": -1})
        await session.generate()
        session.reward(4, "format")
        made = session.trajectory({"correct": 1, "format": 0.25})
    first, second = made.turns
    assert (first.reward, second.reward) == (1 + 1 - 1, 2 + 1 + 0.125)
    assert first.rewards == (
        Reward("format", 2, 0.5), Reward("seen", 7, 0), Reward("kind", -1)
    )  # fmt: skip
    assert second.rewards == (
        Reward("format", 4, 0.5),
        Reward("correct", 1, whole=True),
        Reward("format", 0.25, 0.5, whole=True),
    )
    assert made.reward == 1 + 3.125
    assert made.named_rewards == {"format": 6.25, "seen": 7, "kind": -1, "correct": 1}
    assert stack([made])["reward"].tolist() == [4.125]
    save(tmp_path / "file", [made])
    (loaded,) = load(tmp_path / "file")
    assert loaded.turns == made.turns
    assert loaded.named_rewards == made.named_rewards
    to_jsonl(tmp_path / "lines", [made])
    line = json.loads((tmp_path / "lines").read_text())
    assert line["turns"][0]["rewards"][0] == {
        "name": "format", "value": 2, "weight": 0.5, "call": "", "whole": False
    }  # fmt: skip


async def test_weights_of_single_rewards(client: sglrl.Client) -> None:
    """They take precedence over ``reward_weights``."""
    async with session_of(client, reward_weights={"format": 0.5}) as session:
        await session.generate()
        session.reward(3, "format", weight=2)
        session.reward(1, weight=0.25)
        session.reward({"a": 1, "format": 1}, weight=0)
        for wrong in ("2", True, math.inf):
            with pytest.raises(sglrl.UsageError, match="a weight must be"):
                session.reward(1, weight=wrong)  # type: ignore[arg-type]
        (turn,) = session.trajectory().turns
    assert turn.reward == 6.25
    assert turn.rewards == (Reward("format", 3, 2), Reward("a", 1, 0), Reward("format", 1, 0))


async def test_calls(client: sglrl.Client) -> None:
    async with session_of(client) as session:
        for number in range(3):
            await session.generate()
            # A repeated id means the latest call.
            ids = [f"call_{number}", "same"] if number < 2 else []
            calls = [
                ToolCall(id=id_, name="add", arguments={}, raw="") for id_ in ids
            ]  # fmt: skip
            session._history._said[number] = AssistantMessage(content="", tool_calls=tuple(calls))
        session.reward(1, "tool", call="call_0")
        session.reward(2, "tool", call=calls[0] if calls else "call_1")
        session.reward(4, call="same")
        with pytest.raises(sglrl.UsageError, match="has a call with the id 'call_7'"):
            session.reward(1, call="call_7")
        made = session.trajectory()
    assert [turn.reward for turn in made.turns] == [1, 6, 0]
    assert made.turns[0].rewards == (Reward("tool", 1, call="call_0"),)
    assert made.turns[1].rewards == (Reward("tool", 2, call="call_1"),)


async def test_branches(client: sglrl.Client) -> None:
    async with session_of(client) as session:
        await session.generate()
        session.reward(1, "step")
        await session.generate()
        session.reward(2, "step")
        session.go_back()
        await session.generate()
        session.reward(4, "step")
        made = session.trajectory()
    assert made.reward == 7
    assert made.named_rewards == {"step": 7}
    assert sum(len(turn.rewards) for leaf in made.leaves for turn in leaf.turns) == 3


@pytest.mark.parametrize(
    ("value", "name", "why"),
    [
        ("1", "x", "must be a number"),
        (math.nan, "x", "must be finite"),
        (1e39, "", "must be finite"),
        ({"a": 1, "b": None}, "", "must be a number"),
        ({"a": 1}, "x", "has its own names"),
        ({1: 1}, "", "name of a reward must be a text"),
        (1, 3, "name of a reward must be a text"),
    ],
)
async def test_wrong_rewards(client: sglrl.Client, value: Any, name: Any, why: str) -> None:
    async with session_of(client) as session:
        with pytest.raises(sglrl.UsageError, match="no turn was sampled"):
            session.reward(1)
        await session.generate()
        with pytest.raises(sglrl.UsageError, match=why):
            session.reward(value, name)
        assert not session.rewarded
        assert session.trajectory().turns[0].rewards == ()


@pytest.mark.parametrize("weights", [{"a": math.inf}, {"a": "b"}, {1: 1.0}, [1.0]])
async def test_wrong_weights(client: sglrl.Client, weights: Any) -> None:
    with pytest.raises(sglrl.UsageError, match="must be"):
        session_of(client, reward_weights=weights)


async def agent(session: sglrl.Session, item: Any) -> dict[str, float]:
    await session.generate(max_new_tokens=2)
    session.reward(0.5, "format")
    return {"correct": 1.0, "length": 2.0}


@pytest.mark.parametrize("processes", [None, 1])
async def test_agents_return_named_rewards(client: sglrl.Client, processes: int | None) -> None:
    items = [{"input_ids": [1, 2, number]} for number in range(3)]
    weights = {"length": -0.25}
    async with sglrl.rollout(
        client, agent, items, group_size=2, processes=processes, reward_weights=weights
    ) as run:
        groups = [group async for group in run]
    assert [group.rewards.tolist() for group in groups] == [[1, 1]] * 3
    for group in groups:
        for made in group.trajectories:
            assert made.named_rewards == {"format": 0.5, "correct": 1, "length": 2}
    assert run.metrics.named_rewards == {"format": 0.5, "correct": 1, "length": 2}
    assert run.metrics.flat()["rollout/named_rewards/length"] == 2


async def test_turns_check_their_rewards(client: sglrl.Client) -> None:
    async with session_of(client) as session:
        await session.generate()
        made = session.trajectory(1)
    (turn,) = made.turns
    wrong = sglrl.Turn(start=0, stop=2, rewards=(1.0,))  # type: ignore[arg-type]
    assert turn.rewards == ()
    with pytest.raises(sglrl.UsageError, match=r"turns\[0\].rewards must be rewards"):
        made.replace(turns=(wrong,))


@pytest.mark.parametrize("true", [True, np.True_, np.array(True)], ids=["bool", "numpy", "array"])
async def test_a_bool_is_a_reward(client: sglrl.Client, true: Any) -> None:
    false = False if true is True else np.logical_not(true)

    async def agent(session: sglrl.Session, item: Any) -> Any:
        await session.generate()
        if item["kind"] == "call":
            session.reward(true, "named")
            session.reward(true)
            session.reward({"other": false})
            return None
        return true if item["kind"] == "value" else {"right": true, "wrong": false}

    items = [{"input_ids": [1], "kind": kind} for kind in ("call", "value", "names")]
    rewards, named = {}, {}
    async for group in sglrl.rollout(client, agent, items, max_new_tokens=2):
        (made,) = group.trajectories
        rewards[group.item["kind"]] = made.reward
        named |= made.named_rewards
    assert rewards == {"call": 2.0, "value": 1.0, "names": 1.0}
    assert named == {"named": 1.0, "other": 0.0, "right": 1.0, "wrong": 0.0}
    assert all(type(value) is float for value in named.values())
