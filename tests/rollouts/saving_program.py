"""Save a run twice. Print a line and hang in the second save, before the file is complete.

Arguments: the path, the number of groups before each save, and where to hang: "fsync" (the content
is written under its temporary name) or "rename" (it is on disk).
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from pathlib import Path
from typing import Any, NoReturn

import sglrl

from .agents import FAKE, ITEMS, one_turn


def hang(*args: Any) -> NoReturn:
    print("saving", flush=True)
    threading.Event().wait()
    raise AssertionError("the test kills this process")


async def main(path: str, groups: int, where: str) -> None:
    async with (
        sglrl.launch("fake", **FAKE) as client,
        sglrl.rollout(client, one_turn, ITEMS, group_size=2) as run,
    ):
        await run.take(groups)
        run.save(path)
        await run.take(groups)
        if where == "fsync":
            os.fsync = hang
        else:
            Path.replace = hang  # type: ignore[method-assign, assignment]
        run.save(path)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
