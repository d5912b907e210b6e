"""A trainer in its own process, which runs ``trainer_program.py``."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import sglrl

PROGRAM = Path(__file__).with_name("trainer_program.py")


class Trainer:
    """The process of ``trainer_program.py``."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def says(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = await self.process.stdout.readline()
        assert line, "the trainer has ended"
        return json.loads(line)  # type: ignore[no-any-return]

    def tell(self, **command: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command).encode() + b"\n")

    async def ask(self, **command: Any) -> dict[str, Any]:
        self.tell(**command)
        return await self.says()

    async def kill(self) -> None:
        self.process.kill()
        await self.process.wait()


@asynccontextmanager
async def trainer(client: sglrl.Client) -> AsyncIterator[Trainer]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(PROGRAM),
        client.weights_address,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield Trainer(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        process._transport.close()  # type: ignore[attr-defined]
