"""A program that uses the pool of the process that started it. Says on stdout how far it is."""

from __future__ import annotations

import asyncio
import sys

import sglrl


async def main(address: str, what: str) -> None:
    async with sglrl.connect(address) as client:
        if what == "generate":
            made = await client.generate(input_ids=[3, 1, 4], max_new_tokens=6, logprobs=True)
            print(made.output_ids.tolist(), flush=True)
        else:
            calls = [
                asyncio.ensure_future(client.generate(input_ids=[i], max_new_tokens=30_000))
                for i in range(20)
            ]
            # The first answer of all: the calls are with the pool.
            await client.stats()
            print("begun", flush=True)
            await asyncio.gather(*calls)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2]))
