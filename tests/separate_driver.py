"""Check a driver without torch and SGLang. Its workers run in the environment of another Python.

``tox run -e driver`` runs this with the path of that Python.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import sglrl

PYTHON = sys.argv[1]
IDS = [1, 2, 3, 4]


class Judge(sglrl.Actor):
    @sglrl.endpoint
    async def score(self, length: int) -> float:
        return length / 8


def make_model(seed: int) -> Path:
    code = f"from sglrl.launching.tiny_model import tiny_model; print(tiny_model(seed={seed}))"
    made = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, check=True)
    return Path(made.stdout.strip())


async def greedy(client: sglrl.Client, version: int) -> list[int]:
    """Return the tokens of a greedy answer, sampled by this version of the policy."""
    completion = await client.generate(
        input_ids=IDS, max_new_tokens=8, temperature=0, ignore_eos=True, logprobs=True
    )
    assert all(logprob <= 0 for logprob in completion.logprobs)
    assert completion.versions == ((0, 8, version),)
    return list(completion.output_ids)


async def check() -> None:
    second = make_model(seed=1)
    settings: dict[str, Any] = {"device": "cpu", "python": PYTHON}
    async with (
        sglrl.launch("tiny", **settings) as client,
        sglrl.launch(second, **settings) as other,
        sglrl.spawn(Judge) as judges,
    ):

        async def agent(session: sglrl.Session, item: Any) -> float:
            turn = await session.generate(max_new_tokens=8, ignore_eos=True)
            return await judges.score(len(turn.output_ids))

        items = [{"input_ids": [i, i + 1]} for i in range(1, 5)]
        rewards = [
            [trajectory.reward for trajectory in group.trajectories]
            async for group in sglrl.rollout(client, agent, items, group_size=2)
        ]
        assert rewards == [[1.0, 1.0]] * 4

        expected = await greedy(other, 0)
        assert await greedy(client, 0) != expected
        await client.update_weights_from_disk(second)
        assert await greedy(client, 1) == expected


for name in ("torch", "sglang"):
    assert find_spec(name) is None, f"{name} is installed here"
assert sys.executable != PYTHON
asyncio.run(check())
print(f"rollouts, an actor and weights from files: the workers run in {PYTHON}")
