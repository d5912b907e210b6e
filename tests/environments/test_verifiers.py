"""Environments in the format of verifiers, and those that it ships, in rollouts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import letters
import lookup
import numpy as np
import pytest
import verifiers.v1 as vf
from engine.reference import Reference

import sglrl
from sglrl.gateway.local import local_gateway
from sglrl.integrations.verifiers import EpisodeFailed, VerifiersEnv

pytestmark = pytest.mark.asyncio(loop_scope="session")

SEAT = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}


def letters_env(**seat: Any) -> VerifiersEnv:
    return VerifiersEnv({"taskset": {"id": "letters"}, "agent": {**SEAT, **seat}})


async def played(
    pool: sglrl.Client, env: VerifiersEnv, tasks: int = 1, **options: Any
) -> list[sglrl.Trajectory]:
    options = {"max_new_tokens": 8, "on_error": "raise", "seed": 1, **options}
    items = env.tasks({"limit": tasks})
    async with sglrl.rollout(pool, env.agent, items, gateway=True, **options) as run:
        groups = [group async for group in run]
    return [trajectory for group in groups for trajectory in group.trajectories]


def check_rewards(trajectory: sglrl.Trajectory, *traces: Mapping[str, Any]) -> None:
    """Check that the rewards of each conversation are those of its trace."""
    leaves = trajectory.leaves
    assert len(leaves) == len(traces)
    for leaf, trace in zip(leaves, traces, strict=True):
        found = {reward.name: reward for reward in leaf.turns[-1].rewards}
        assert found.keys() == trace["rewards"].keys()
        for name, reward in trace["rewards"].items():
            assert (found[name].value, found[name].weight) == (reward["score"], reward["weight"])
        assert leaf.turns[-1].reward == trace["reward"]
        assert all(turn.reward == 0 for turn in leaf.turns[:-1])
    assert trajectory.reward == pytest.approx(sum(trace["reward"] for trace in traces))


async def test_tasks_with_rewards_and_metrics(pool: sglrl.Client, reference: Reference) -> None:
    letters.played.clear()
    made = await played(pool, letters_env(), 2, group_size=2, temperature=0.7)
    assert len(made) == 4
    own = {trace.last_reply: trace for trace in letters.played}
    for trajectory in made:
        (record,) = trajectory.metadata["traces"]
        assert len(trajectory.turns) == 1
        assert trajectory.messages is not None
        trace = own[trajectory.messages[-1]["content"].strip()]
        assert trajectory.reward == trace.reward == record["reward"]
        assert trajectory.named_rewards == {k: r.score for k, r in trace.rewards.items() if r}
        assert record["metrics"] == trace.metrics == {"characters": len(trace.last_reply)}
        check_rewards(trajectory, record)
        # The tokens are those of the model's own probabilities, with the temperature of the run.
        messages = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": trace.task.data.prompt},
        ]
        assert trajectory.messages[:2] == messages
        found = reference.logprobs_of(trajectory.prompt_ids, trajectory.response_ids, 0.7)
        np.testing.assert_allclose(trajectory.logprobs, found, atol=2e-4)


async def test_tools(pool: sglrl.Client, biases: Any) -> None:
    """The seat's own sampling parameters make a random model call the tool in each turn."""
    sampling = {"tool_choice": "required", "logit_bias": biases, "max_tokens": 500}
    seat = {**SEAT, "sampling": sampling, "max_turns": 2}
    env = VerifiersEnv({"taskset": {"id": "lookup"}, "agent": seat})
    (trajectory,) = await played(pool, env, max_new_tokens=None)
    (record,) = trajectory.metadata["traces"]
    assert record["stop_condition"] == "max_turns"
    first, second = trajectory.turns
    assert trajectory.branches == ()
    results = [m["content"] for m in trajectory.messages or () if m["role"] == "tool"]
    assert results
    assert all(lookup.FRUIT in json.dumps(result) for result in results)
    assert record["rewards"]["looked_up"]["weight"] == 2.0
    assert trajectory.reward == record["reward"] == 2.0 * len(results)
    assert not trajectory.loss_mask[first.stop : second.start].any()
    check_rewards(trajectory, record)


async def test_a_modeled_user(pool: sglrl.Client) -> None:
    """verifiers' environment "user-sim": the turns of the user are in no trajectory."""
    # Without reasoning, which the chat template would remove from earlier turns.
    words = {"sampling": {"regex": "[a-z]{4,8}"}}
    user = {**SEAT, **words, "max_turns": 2}
    assistant = {**SEAT, **words}
    config = {"id": "user-sim", "taskset": {"id": "letters"}, "assistant": assistant, "user": user}
    (trajectory,) = await played(pool, VerifiersEnv(config), max_new_tokens=20)
    records = {record["seat"]: record for record in trajectory.metadata["traces"]}
    assert not records["user"]["trainable"]
    assert records["user"]["turns"] == 2
    assert len(trajectory.turns) == records["assistant"]["turns"] == 2
    assert records["assistant"]["metrics"]["user_turns"] == 2
    assert [m["role"] for m in trajectory.messages or ()] == [
        "system",
        *["user", "assistant"] * 2,
    ]
    check_rewards(trajectory, records["assistant"])


async def test_several_traces(pool: sglrl.Client) -> None:
    """verifiers' environment "best-of-n": each trace is a conversation with its own rewards."""
    config = {"id": "best-of-n", "taskset": {"id": "letters"}, "agent": SEAT, "n": 2}
    (trajectory,) = await played(pool, VerifiersEnv(config))
    records = trajectory.metadata["traces"]
    assert [record["metrics"]["pass_at_n"] for record in records] == [
        float(max(record["reward"] for record in records) >= 1)
    ] * 2
    check_rewards(trajectory, *records)


async def test_agents_in_processes(pool: sglrl.Client) -> None:
    """The weights of the run replace those of the environment."""
    weights = {"short": 3.0}
    made = await played(pool, letters_env(), processes=1, reward_weights=weights)
    for trajectory in made:
        rewards = {reward.name: reward for reward in trajectory.turns[0].rewards}
        assert rewards["short"].weight == 3.0
        assert rewards["wanted_letters"].weight == 0.5
        assert trajectory.reward == sum(r.weight * r.value for r in rewards.values())


async def test_episodes_that_fail(pool: sglrl.Client) -> None:
    with pytest.raises(
        EpisodeFailed, match=r"the seat 'agent' has failed: ProviderError: .*banana"
    ):
        await played(pool, letters_env(sampling={"banana": 1}))
    env = letters_env()
    agent = env.agent

    async def ask(items: Any) -> None:
        async with sglrl.rollout(pool, agent, items, gateway=True, on_error="raise") as run:
            [group async for group in run]

    with pytest.raises(sglrl.UsageError, match=r"those of VerifiersEnv\.tasks"):
        await ask([{"task": "Write."}])
    async with sglrl.rollout(
        pool, agent, env.tasks(), open_session=lambda item: {}, on_error="raise"
    ) as run:
        with pytest.raises(sglrl.UsageError, match="gateway=True"):
            await run.take(1)


async def test_a_seat_with_an_endpoint_of_its_own(pool: sglrl.Client) -> None:
    """Its requests go there. Here no other seat is left for the rollout."""
    letters.played.clear()
    async with local_gateway(pool) as gateway:
        client = {"type": "eval", "base_url": f"{gateway.url}/v1"}
        env = letters_env(client=client, model="qwen3", sampling={"max_tokens": 4})
        with pytest.raises(EpisodeFailed, match="played no trainable seat"):
            await played(pool, env)
    (trace,) = letters.played
    assert trace.usage is not None
    assert trace.usage.completion_tokens == 4


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ({"agent": {**SEAT, "retries": {"max_retries": 1}}}, r"agent\.retries has no effect"),
        ({"retries": {"max_retries": 1}}, r"retries has no effect"),
        ({"agent": {**SEAT, "model": "other"}}, r"agent\.model='other' needs agent\.client"),
    ],
)
async def test_settings_that_are_rejected(config: dict[str, Any], what: str) -> None:
    with pytest.raises(sglrl.UsageError, match=what):
        VerifiersEnv({"taskset": {"id": "letters"}, **config})


async def test_a_configuration_of_verifiers_own() -> None:
    config = vf.resolve_env_config({"taskset": {"id": "letters"}})
    assert VerifiersEnv(config).config == config
    tasks = list(VerifiersEnv(config).tasks({"include": {"idx": [2]}}))
    assert [task["task"]["wanted"] for task in tasks] == ["e"]
