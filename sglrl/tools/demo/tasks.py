"""Two tasks that a policy with random weights can learn: data set, agent and tool."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

from ...actors.actor import Actor, endpoint
from ...actors.spawning import ActorHandle
from ...sessions.session import Session

DIGITS = "0123456789"
NAMES = "abcdef"
CHARACTERS = DIGITS + NAMES
"""The policy's vocabulary, without the tokens of the chat template."""
TASKS = ("repeat", "lookup")
TOOL_SECONDS = 0.2, 0.8


class Shelf(Actor):
    """The tool, in a separate process: returns the digits stored on a shelf under a name.

    A policy cannot know them without calling the tool, because every question has a different
    shelf.
    """

    @endpoint(idempotent=True)
    async def look_up(self, shelf: int, name: str) -> str:
        """Return two digits. Sleeps for a random time, to act like a real tool."""
        found = random.Random(f"{shelf}/{name}")
        await asyncio.sleep(found.uniform(*TOOL_SECONDS))
        return "".join(found.choices(DIGITS, k=2))


def items(tasks: Sequence[str], seed: int) -> Iterator[dict[str, Any]]:
    """Yield an endless data set that cycles through the tasks. The seed determines the items."""
    for number in count():
        chance = random.Random(f"{seed}/{number}")
        task = tasks[number % len(tasks)]
        text = "".join(chance.choices(DIGITS, k=4)) if task == "repeat" else chance.choice(NAMES)
        yield {
            "task": task,
            "messages": [{"role": "user", "content": text}],
            "shelf": chance.randrange(1 << 40),
        }


class Agent:
    """Runs either task. The maximum reward is 1."""

    def __init__(self, shelf: ActorHandle) -> None:
        self._shelf = shelf

    async def __call__(self, session: Session, item: dict[str, Any]) -> float | None:
        session.metadata["task"] = item["task"]
        question = item["messages"][0]["content"]
        if item["task"] == "repeat":
            turn = await session.generate(max_new_tokens=len(question))
            return share(turn.text, question)
        call = await session.generate(max_new_tokens=1)
        if call.text != question:
            return 0.0
        session.reward(0.5)
        answer = await self._shelf.look_up(item["shelf"], call.text)
        session.observe({"role": "tool", "content": answer})
        turn = await session.generate(max_new_tokens=len(answer))
        return 0.5 * share(turn.text, answer)


def share(text: str, wanted: str) -> float:
    """Return the share of the wanted characters that are in their place: 0..1."""
    return sum(a == b for a, b in zip(text, wanted, strict=False)) / len(wanted)
