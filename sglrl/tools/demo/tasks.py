"""The two tasks of the demo: their data set, their agent and its tool.

A policy with random weights can learn both tasks.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any

from ...actors.actor import Actor, endpoint
from ...actors.spawning import ActorHandle
from ...errors import ToolError
from ...sessions.session import Session

DIGITS = "0123456789"
NAMES = "abcdef"
CHARACTERS = DIGITS + NAMES
"""The policy's vocabulary, without the tokens of the chat template."""
TASKS = ("repeat", "lookup")
TOOL_SECONDS = 0.2, 0.8
RENDERER = f"{__package__}.letters:LetterRenderer"


class Shelf(Actor):
    """The tool: returns the digits that a shelf stores under a name. Runs in a separate process.

    A policy cannot know the digits without calling the tool, because every question has a different
    shelf.
    """

    @endpoint(idempotent=True)
    async def look_up(self, shelf: int, name: str) -> str:
        """Return two digits, after a random time like that of a real tool."""
        rng = random.Random(f"{shelf}/{name}")
        await asyncio.sleep(rng.uniform(*TOOL_SECONDS))
        return "".join(rng.choices(DIGITS, k=2))


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


def session_arguments(item: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``Client.session`` for an item."""
    # The chat template cannot show tools, so the renderer itself knows the only tool.
    calls = {"renderer": RENDERER} if item["task"] == "lookup" else {}
    return {"messages": item["messages"], **calls}


class Agent:
    """Runs an item of either task and returns its reward. The maximum reward is 1.

    Args:
        shelf: the tool.
        names: the token ids of ``NAMES``. Each of these tokens is a tool call and ends a turn.
    """

    def __init__(self, shelf: ActorHandle, names: list[int]) -> None:
        self._shelf = shelf
        self._names = names

    async def __call__(self, session: Session, item: dict[str, Any]) -> float:
        session.metadata["task"] = item["task"]
        run = self._repeat if item["task"] == "repeat" else self._look_up
        return await run(session, item["messages"][0]["content"], item["shelf"])

    async def _repeat(self, session: Session, question: str, shelf: int) -> float:
        turn = await session.generate(max_new_tokens=len(question))
        return share(turn.text, question)

    async def _look_up(self, session: Session, question: str, shelf: int) -> float:
        answer = ""

        async def look_up(name: str) -> str:
            nonlocal answer
            if name != question:
                raise LookupError(f"there is no shelf {name!r}")
            session.reward(0.5)
            answer = str(await self._shelf.look_up(shelf, name))
            return answer

        try:
            turn = await session.run_tools(
                [look_up],
                max_turns=2,
                max_new_tokens=2,
                stop_token_ids=self._names,
                on_error="raise",
            )
        except ToolError:
            return 0.0
        return 0.5 * share(turn.text, answer) if answer else 0.0


def share(text: str, wanted: str) -> float:
    """Return the share of the wanted characters that are at the right position: 0..1."""
    return sum(a == b for a, b in zip(text, wanted, strict=False)) / len(wanted)
