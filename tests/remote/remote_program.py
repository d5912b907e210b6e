"""A program that uses the pool of its parent process, or launches a pool for its parent.

It prints its progress on stdout.
"""

from __future__ import annotations

import asyncio
import sys

import sglrl


async def main(address: str, what: str) -> None:
    if what == "launch":
        async with sglrl.launch(
            "fake", engine="fake", step_seconds=0.01, tokens_per_step=1, context_length=40_000
        ) as pool:
            print(pool.address, flush=True)
            await asyncio.Event().wait()
    async with sglrl.connect(address) as client:
        if what == "generate":
            made = await client.generate(input_ids=[3, 1, 4], max_new_tokens=6, logprobs=True)
            print(made.output_ids.tolist(), flush=True)
        else:
            calls = [
                asyncio.ensure_future(client.generate(input_ids=[i], max_new_tokens=30_000))
                for i in range(20)
            ]
            # When the first answer arrives, the pool has received the calls.
            await client.stats()
            print("begun", flush=True)
            await asyncio.gather(*calls)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2]))
