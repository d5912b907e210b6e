"""A driver with workers on a node: ``python driver_program.py ADDRESS HEARTBEAT_TIMEOUT``.

It prints a line of JSON when its workers are ready. For each line of input it prints the answers of
a call to every worker, and the workers.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import sglrl


def say(client: sglrl.Client, **more: Any) -> None:
    workers = [(worker.host, worker.pid, worker.state) for worker in client.workers]
    print(json.dumps({"workers": workers, **more}), flush=True)


async def main(address: str, heartbeat_timeout: str) -> None:
    hosts = sglrl.Hosts(address, heartbeat_timeout=float(heartbeat_timeout))
    async with sglrl.launch(
        "fake", engine="fake", replicas=2, hosts=hosts, tokens_per_step=1, step_seconds=0.01
    ) as client:
        say(client)
        loop = asyncio.get_running_loop()
        while await loop.run_in_executor(None, sys.stdin.readline):
            calls = [client.generate(input_ids=[n, 2], max_new_tokens=50) for n in range(8)]
            answers = [made.output_ids.tolist() for made in await asyncio.gather(*calls)]
            await client.wait_until_full()
            say(client, right=answers == [[n, 2] * 25 for n in range(8)])


asyncio.run(main(*sys.argv[1:]))
