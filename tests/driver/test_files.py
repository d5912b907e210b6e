"""Connections that never introduce themselves do not use up the program's open files."""

from __future__ import annotations

import asyncio
import resource
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

import sglrl

PROGRAM = Path(__file__).with_name("files_program.py")
FLOOD = 5000
"""Five times as many connections as the program may have open files."""


class Program:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def says(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = await self.process.stdout.readline()
        assert line, "the program has ended"
        return msgspec.json.decode(line, type=dict[str, Any])

    async def do(self, what: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode({"do": what}) + b"\n")
        return await self.says()


@asynccontextmanager
async def program(soft: int, hard: int) -> AsyncIterator[tuple[Program, str]]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(PROGRAM), str(soft), str(hard)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    made = Program(process)
    try:
        yield made, (await made.says())["address"]
        assert process.stdin is not None
        process.stdin.close()
        assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        process._transport.close()  # type: ignore[attr-defined]


@pytest.fixture
def many_files() -> Iterator[None]:
    """Raise this process's file limit, because it holds the other ends of the flood."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] != resource.RLIM_INFINITY and before[1] < FLOOD + 500:
        pytest.skip(f"needs {FLOOD + 500} open files, and may have {before[1]}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], FLOOD + 500), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("many_files")
@pytest.mark.parametrize("says", [b"", b"\xff" + b"\0" * 8 + b"\x7f\x03\x00NULL"])
async def test_a_flood_of_connections(says: bytes) -> None:
    works = {"made": [[3, 1, 3, 1]] * 2, "limits": [1024, 1024]}
    async with program(1024, 1024) as (other, address):
        assert await other.do("work") == {**works, "closed": 0}
        host, port = address.partition("#")[0].removeprefix("tcp://").split(":")
        with ExitStack() as stack:

            def flood() -> None:
                for _ in range(FLOOD):
                    one = stack.enter_context(socket.create_connection((host, int(port))))
                    one.setblocking(False)
                    if says:
                        one.send(says)

            async with sglrl.connect(address) as before:
                flooding = asyncio.create_task(asyncio.to_thread(flood))
                added = []
                while not flooding.done():
                    found = await other.do("work")
                    assert found | {"made": works["made"], "closed": 0} == {**works, "closed": 0}
                    async with sglrl.connect(address) as during:
                        for client in (before, during):
                            made = await client.generate(input_ids=[5], max_new_tokens=2)
                            assert made.output_ids.tolist() == [5, 5]
                    if not added:
                        added = (await other.do("grow"))["added"]
                await flooding
            found = await other.do("work")
            assert found["made"] == [[3, 1, 3, 1]] * 3
            assert found["closed"] > FLOOD / 2


async def test_the_limit_of_open_files_is_raised() -> None:
    async with program(300, 3000) as (other, _):
        assert (await other.do("work"))["limits"] == [3000, 3000]
