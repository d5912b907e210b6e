"""A program with a pool over TCP that may open only a few files.

    python files_program.py SOFT HARD

SOFT and HARD are its limits of open files. Each line of input is a command; each line of output is
its result, in JSON. Commands:

* "work": open a file, make a call to every worker, and report the limits and the number of
  connections that were closed because there were too many.
* "grow": start another worker.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
from typing import Any

import sglrl
from sglrl.transport.zmq import ZmqRouter


def say(**result: Any) -> None:
    print(json.dumps(result), flush=True)


async def main(soft: str, hard: str) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(soft), int(hard)))
    loop = asyncio.get_running_loop()
    async with sglrl.launch("fake", engine="fake", replicas=2, address="tcp") as client:
        say(address=client.address)
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            if json.loads(line) == {"do": "grow"}:
                say(added=await client.add_workers(1))
                continue
            with open(__file__):  # noqa: ASYNC230
                pass
            transport = client.pool.driver.transport
            assert isinstance(transport, ZmqRouter)
            made = await asyncio.gather(
                *(
                    client.generate(input_ids=[3, 1], max_new_tokens=4, worker=w.id)
                    for w in client.workers
                )
            )
            say(
                made=[completion.output_ids.tolist() for completion in made],
                limits=resource.getrlimit(resource.RLIMIT_NOFILE),
                closed=transport.cut_off,
            )


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
