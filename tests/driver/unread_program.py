"""A client in another process that requests much data at once. It prints its progress on stdout."""

from __future__ import annotations

import asyncio
import sys

import sglrl


async def main(address: str, what: str) -> None:
    async with sglrl.connect(address) as client:
        if what == "rows":
            rows = [asyncio.ensure_future(client.next_token_logprobs([i])) for i in range(2000)]
            await asyncio.wait(rows, return_when=asyncio.FIRST_COMPLETED)
            print("begun", flush=True)
            found = [len((await row).logprobs) for row in rows]
            print(found.count(client.info.vocab_size), "rows", flush=True)
            return
        calls = [
            asyncio.ensure_future(
                client.generate(input_ids=[i], max_new_tokens=100_000, logprobs=True)
            )
            for i in range(100)
        ]
        # When the first answer arrives, the pool has received the calls.
        await client.stats()
        print("begun", flush=True)
        ends = await asyncio.gather(*calls, return_exceptions=True)
        print(*{type(end).__name__ for end in ends}, flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2]))
