"""A program on one of two hosts: runs a pool, or a client of the pool on the other host.

    python link_program.py pool ADDRESS HEARTBEAT_TIMEOUT
    python link_program.py client ADDRESS HEARTBEAT_TIMEOUT

Each line of input is a command in JSON; each line of output is its result.
"""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import suppress
from typing import Any

import sglrl


def say(**result: Any) -> None:
    print(json.dumps(result), flush=True)


async def commands() -> Any:
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        yield json.loads(line)


async def pool(address: str, heartbeat_timeout: float) -> None:
    """Run a pool and answer commands.

    ``{"wait": n}`` is answered when the pool knows n clients in other processes. ``{"idle": 0}`` is
    answered when no worker holds a call. A command with both keys waits for both conditions.
    """
    async with sglrl.launch(
        "fake",
        engine="fake",
        replicas=2,
        tokens_per_step=1,
        step_seconds=0.01,
        context_length=1 << 20,
        address=f"tcp://{address}:*",
        insecure=True,
        heartbeat_timeout=heartbeat_timeout,
    ) as client:
        say(address=client.address)
        server = client._server
        assert server is not None
        async for command in commands():
            while len(server._peers) != command.get("wait", len(server._peers)) or (
                "idle" in command and any(w.load for w in client.workers)
            ):
                # This round trip to a worker takes one step of the engine.
                await client.generate(input_ids=[1], max_new_tokens=1)
            say(clients=len(server._peers), states=[w.state for w in client.workers])


async def client(address: str, heartbeat_timeout: float) -> None:
    """Run a client and answer commands.

    ``{"stream": n, "tokens": m}`` begins n streams; it is answered when each stream has received
    its first tokens. ``{"end": 0}`` is answered when all streams have ended; the answer has their
    tokens or errors.
    """
    async with sglrl.connect(address, insecure=True, heartbeat_timeout=heartbeat_timeout) as remote:
        say(states=[w.state for w in remote.workers])
        got: list[list[int]] = []
        tasks: list[asyncio.Task[None]] = []

        async def read(ids: list[int], into: list[int], first: asyncio.Event, tokens: int) -> None:
            async for chunk in remote.stream(input_ids=ids, max_new_tokens=tokens):
                into += chunk.output_ids.tolist()
                first.set()

        async for command in commands():
            if "stream" in command:
                begun = []
                for n in range(command["stream"]):
                    got.append([])
                    begun.append(asyncio.Event())
                    work = read([1 + n, 2, 3], got[-1], begun[-1], command["tokens"])
                    tasks.append(asyncio.create_task(work))
                for event in begun:
                    await event.wait()
                say(begun=len(begun))
            else:
                ended = await asyncio.gather(*tasks, return_exceptions=True)
                say(
                    errors=[type(e).__name__ for e in ended if e is not None],
                    messages=sorted({str(e) for e in ended if e is not None}),
                    tokens=got,
                    states=[w.state for w in remote.workers],
                )


async def main(what: str, address: str, heartbeat_timeout: str) -> None:
    with suppress(sglrl.Closed):
        await (pool if what == "pool" else client)(address, float(heartbeat_timeout))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3]))
