"""Count the files and functions of sglrl that one operation enters on the driver's event loop.

``python -m tests.documents.followed_calls`` prints the numbers that the pages state. Each operation
runs several times after a warm-up. A function that only some of the runs enter is not counted,
because timers and reports of workers run in between. Threads and the engine's process are not
counted, so the fake engine serves.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import torch

import sglrl
from sglrl.gateway.local import LocalGateway
from sglrl.gateway.settings import Settings

_ROOT = str(Path(sglrl.__file__).parent)
_RUNS = 4


class Entered(NamedTuple):
    """How many files and functions of the package an operation enters."""

    files: int
    functions: int


async def _entered(run: Callable[[], Awaitable[Any]]) -> Entered:
    await run()
    seen: list[set[tuple[str, str]]] = []
    for _ in range(_RUNS):
        found: set[tuple[str, str]] = set()

        def profile(frame: Any, event: str, argument: Any, found: Any = found) -> None:
            code = frame.f_code
            if event == "call" and code.co_filename.startswith(_ROOT) and code.co_name[0] != "<":
                found.add((code.co_filename, code.co_qualname))

        sys.setprofile(profile)
        try:
            await run()
        finally:
            sys.setprofile(None)
        seen.append(found)
    always = set.intersection(*seen)
    return Entered(len({file for file, _ in always}), len(always))


async def _agent(session: sglrl.Session, item: Any) -> float:
    await session.generate(max_new_tokens=4)
    return 1.0


async def follow() -> dict[str, Entered]:
    """Return the counts by the page that follows the operation."""
    async with sglrl.launch("tiny", engine="fake", vocab_size=512) as client:

        async def generate() -> None:
            await client.generate(input_ids=[1, 2, 3], max_new_tokens=4)

        async def update() -> None:
            await client.update_weights({"weight": torch.zeros(2, 2)})

        async def roll() -> None:
            items = [{"input_ids": [1, 2, 3]}]
            async with sglrl.rollout(client, _agent, items, group_size=1) as run:
                async for _ in run:
                    pass

        found = {
            "request.md": await _entered(generate),
            "weight-update.md": await _entered(update),
            "rollout.md": await _entered(roll),
        }
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
        # ``serve`` starts a process that does this with a client of ``sglrl.connect``.
        settings = Settings(names=("tiny",))
        async with (
            LocalGateway(client, settings) as gateway,
            httpx.AsyncClient(timeout=300) as http,
        ):

            async def chat() -> None:
                answer = await http.post(f"{gateway.url}/v1/chat/completions", json=body)
                answer.raise_for_status()

            found["chat-completion.md"] = await _entered(chat)
    return found


if __name__ == "__main__":
    for page, entered in sglrl.run(follow()).items():
        print(f"docs/{page}: {entered.files} files, {entered.functions} functions")
