"""Start workers on an SGLang whose source is partly unknown, and print what happens as JSON.

Run it in the folder of tests: ``python -m engine.unknown_source_program MODEL``.
"""

from __future__ import annotations

import asyncio
import json
import sys

import sglrl


async def main(model: str) -> None:
    try:
        async with sglrl.launch(model, device="cpu"):
            refused = ""
    except sglrl.WorkerStartError as error:
        refused = str(error)
    async with sglrl.launch(model, device="cpu", allow_unknown_sglang=True) as client:
        completion = await client.generate(input_ids=[1, 2, 3], max_new_tokens=4, ignore_eos=True)
        tokens = len(completion.output_ids)
        on = client.info.accelerations
    print(json.dumps({"refused": refused, "tokens": tokens, "on": on}))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
