"""Environments with Gymnasium's interface over text, played by a real engine."""

from __future__ import annotations

import asyncio
import functools
import threading
from typing import Any

import cloudpickle
import gymnasium
import pytest
from gymnasium.spaces import Text

import sglrl
from sglrl.integrations.gymnasium import GymnasiumAgent

pytestmark = pytest.mark.asyncio(loop_scope="session")

RULES = [{"role": "system", "content": "Guess the letters."}]


class Guess(gymnasium.Env[str, str]):
    """Rewards the letters of a secret. It ends after three guesses."""

    observation_space = Text(100)
    action_space = Text(1000)

    def __init__(self, log: list[Guess] | None = None, length: int = 1) -> None:
        self.actions: list[str] = []
        self.rewards: list[float] = []
        self.threads: set[int] = set()
        self.closed = False
        self._length = length
        if log is not None:
            log.append(self)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.threads.add(threading.get_ident())
        self.seed = seed
        self.secret = "".join(self.np_random.choice(list("abcdefgh"), 4))
        self.options = options
        return f"It begins with {self.secret[0]}.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.threads.add(threading.get_ident())
        self.actions.append(action)
        reward = sum(action.count(letter) for letter in self.secret) / 4
        self.rewards.append(reward)
        return f"{reward:g} " * self._length, reward, len(self.actions) == 3, False, {}

    def close(self) -> None:
        self.threads.add(threading.get_ident())
        assert not self.closed
        self.closed = True


async def played(
    client: sglrl.Client, agent: Any, items: list[dict[str, Any]], **options: Any
) -> list[sglrl.Trajectory]:
    options = {"max_new_tokens": 12, "on_error": "raise", "seed": 5, **options}
    async with sglrl.rollout(client, agent, items, **options) as run:
        groups = [group async for group in run]
    return [trajectory for group in groups for trajectory in group.trajectories]


async def test_episodes_are_those_of_the_environment(client: sglrl.Client) -> None:
    log: list[Guess] = []
    items = [{"messages": RULES, "seed": n, "options": {"level": n}} for n in (3, 4)]
    agent = GymnasiumAgent(functools.partial(Guess, log))
    made = await played(client, agent, items, group_size=2)
    assert len(made) == len(log) == 4
    by_actions = {tuple(env.actions): env for env in log}
    assert len(by_actions) == 4
    for trajectory in made:
        texts = [
            client.tokenizer.decode(
                trajectory.response_ids[turn.start : turn.stop], skip_special_tokens=True
            )
            for turn in trajectory.turns
        ]
        env = by_actions[tuple(texts)]
        assert env.seed == items[trajectory.metadata["item"]]["seed"]
        assert env.options == {"level": env.seed}
        assert env.closed
        assert len(env.threads) == 1
        assert env.threads != {threading.get_ident()}

        # Play the same actions by hand.
        other = Guess()
        observations = [other.reset(seed=env.seed)[0]]
        results = [other.step(text) for text in texts]
        observations += [result[0] for result in results[:-1]]
        assert trajectory.rewards.tolist() == pytest.approx([result[1] for result in results])
        assert other.secret == env.secret
        roles = [message["role"] for message in trajectory.messages or ()]
        assert roles == ["system", *["user", "assistant"] * 3]
        asked = [m["content"] for m in trajectory.messages or () if m["role"] == "user"]
        assert asked == observations
        assert trajectory.metadata["terminated"]
        assert not trajectory.metadata["truncated"]
    assert any(trajectory.reward for trajectory in made)


async def test_limits_of_an_episode(client: sglrl.Client) -> None:
    """The largest number of turns, and the context, which long observations fill."""
    long = client.info.max_total_tokens // 5
    for agent, turns in (
        (GymnasiumAgent(Guess, max_turns=2), 2),
        (GymnasiumAgent(functools.partial(Guess, None, long)), 1),
    ):
        (made,) = await played(client, agent, [{"messages": RULES, "seed": 0}])
        assert len(made.turns) == turns
        assert made.metadata["truncated"]
        assert not made.metadata["terminated"]


class Numbers:
    """Has Gymnasium's interface with coroutine functions, and its values are numbers."""

    closed = 0

    async def reset(self, *, seed: int | None, options: Any) -> tuple[int, dict[str, Any]]:
        await asyncio.sleep(0)
        self.last = seed or 0
        return self.last, {}

    async def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        await asyncio.sleep(0)
        self.last += action
        return self.last, 0.5, False, True, {}

    async def close(self) -> None:
        Numbers.closed += 1


async def test_asynchronous_environments_of_other_values(client: sglrl.Client) -> None:
    agent = GymnasiumAgent(
        Numbers,
        action=lambda turn: len(turn.output_ids),
        observation=lambda number: f"number {number}",
    )
    agent = cloudpickle.loads(cloudpickle.dumps(agent))
    before = Numbers.closed
    (made,) = await played(client, agent, [{"seed": 7}], open_session=lambda item: {})
    assert (made.messages or [])[0] == {"role": "user", "content": "number 7"}
    assert made.rewards.tolist() == [0.5]
    assert made.metadata["truncated"]
    assert Numbers.closed == before + 1


class Blocks(Guess):
    """Its step blocks until the test lets it go on."""

    has_begun = threading.Event()
    go_on = threading.Event()
    has_closed = threading.Event()

    def step(self, action: str) -> Any:
        self.has_begun.set()
        assert self.go_on.wait(300)
        return super().step(action)

    def close(self) -> None:
        super().close()
        self.has_closed.set()


async def test_a_step_that_blocks(client: sglrl.Client) -> None:
    """The run is cancelled, the loop goes on, and the environment is closed after its step."""
    items = [{"messages": RULES, "seed": 0}]
    run = asyncio.create_task(played(client, GymnasiumAgent(Blocks), items))
    assert await asyncio.to_thread(Blocks.has_begun.wait, 300)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert not Blocks.has_closed.is_set()
    Blocks.go_on.set()
    assert await asyncio.to_thread(Blocks.has_closed.wait, 300)


class Fails(Guess):
    def step(self, action: str) -> Any:
        raise RuntimeError("no such move")


async def test_errors(client: sglrl.Client) -> None:
    log: list[Guess] = []
    items = [{"messages": RULES}]
    with pytest.raises(RuntimeError, match="no such move"):
        await played(client, GymnasiumAgent(functools.partial(Fails, log)), items)
    assert [env.closed for env in log] == [True]
    with pytest.raises(sglrl.UsageError, match="an observation must be a text, got int"):
        await played(client, GymnasiumAgent(Numbers), items)
    with pytest.raises(sglrl.UsageError, match="an item must be a mapping"):
        await played(client, GymnasiumAgent(Guess), ["Guess."])  # type: ignore[list-item]
    with pytest.raises(sglrl.UsageError, match="make must be a function"):
        GymnasiumAgent(Guess())  # type: ignore[arg-type]
    with pytest.raises(sglrl.UsageError, match="max_turns must be an integer of at least 1"):
        GymnasiumAgent(Guess, max_turns=0)
