"""``python -m bench.accelerations``: what each acceleration of SGLang gains, one by one.

One engine runs with all accelerations, then one engine without each of them. Every engine has the
same four loads. A gain is the rate with all accelerations divided by the rate without this one.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any

import typer

import sglrl

from .cases import CASES, engine_arguments, model_folder
from .report import console, machine, number, print_note, table, write_json

Load = Callable[[sglrl.Client, int], Awaitable[int]]
"""Run one repetition, and return how many units it had."""

_NAMES = ("gpu_sampling", "decode_results", "shared_prefix", "short_prefill", "queries")


def _ids(seed: object, length: int) -> list[int]:
    draw = random.Random(str(seed))
    return [draw.randrange(512) for _ in range(length)]


async def _decode(client: sglrl.Client, repetition: int) -> int:
    """Sample 128 tokens after each of 256 prompts of 64 tokens, with logprobs."""
    calls = [
        client.generate(
            input_ids=_ids((repetition, i), 64), max_new_tokens=128, ignore_eos=True, logprobs=True
        )
        for i in range(256)
    ]
    return sum(len(answer.output_ids) for answer in await asyncio.gather(*calls))


async def _groups(client: sglrl.Client, repetition: int) -> int:
    """Sample 8 times 16 tokens after each of 32 prompts of 512 tokens."""
    calls = [
        client.generate(
            input_ids=_ids((repetition, i), 512), n=8, max_new_tokens=16, ignore_eos=True
        )
        for i in range(32)
    ]
    return sum(len(one.output_ids) for group in await asyncio.gather(*calls) for one in group)


async def _turns(client: sglrl.Client, repetition: int) -> int:
    """Run 64 conversations of 12 turns: 8 tokens are sampled, then 12 tokens are observed."""

    async def converse(number: int) -> None:
        seed = (repetition, number)
        async with client.session(input_ids=_ids(seed, 128)) as session:
            for turn in range(12):
                await session.generate(max_new_tokens=8, ignore_eos=True)
                session.observe(_ids((*seed, turn), 12))

    await asyncio.gather(*[converse(number) for number in range(64)])
    return 64 * 12


async def _queries(client: sglrl.Client, repetition: int) -> int:
    """Ask 32 times for the next 100 likeliest tokens, each time after one more token, 64 tasks."""

    async def ask(number: int) -> None:
        ids = _ids((repetition, number), 32)
        for _ in range(32):
            found = await client.next_token_logprobs(ids, top_k=100)
            assert found.token_ids is not None
            ids.append(int(found.token_ids[0]) % 512)

    await asyncio.gather(*[ask(number) for number in range(64)])
    return 64 * 32


LOADS: dict[str, Load] = {
    "decode, tokens/s": _decode,
    "groups of 8, tokens/s": _groups,
    "short turns/s": _turns,
    "next-token queries/s": _queries,
}


async def _measure(
    folder: Path, arguments: dict[str, Any], names: list[str], repeats: int
) -> dict[str, float]:
    """Return the median rate of each load."""
    rates: dict[str, float] = {}
    async with sglrl.launch(folder, accelerations=names, **arguments) as client:
        missing = set(names) - set(client.info.accelerations)
        if missing:
            console.print(f"off here: {', '.join(sorted(missing))}")
        for load, run in LOADS.items():
            found = []
            for repetition in range(repeats + 1):
                await client.flush_cache()
                begun = time.perf_counter()
                units = await run(client, repetition)
                found.append(units / (time.perf_counter() - begun))
            # The first repetition is the warm-up.
            rates[load] = statistics.median(found[1:])
    return rates


def main(
    case: Annotated[str, typer.Option(help="tiny-cpu, 0.6b or 8b.")] = "0.6b",
    name: Annotated[
        list[str] | None, typer.Option(help="Only without this acceleration; repeatable.")
    ] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Repetitions; the median counts.")] = 3,
    json: Annotated[Path | None, typer.Option(help="Write all figures to this file.")] = None,
) -> None:
    """Measure four loads with all accelerations, and without each of them."""
    chosen = CASES[case]
    arguments = engine_arguments(chosen._replace(in_flight=256), {}) | {
        "device": chosen.device,
        "dtype": chosen.dtype,
    }
    folder = model_folder(chosen)
    known = [*_NAMES, "parameter_arena"]
    results: dict[str, dict[str, float]] = {}
    for without in ("", *(name or _NAMES)):
        names = [one for one in known if one != without]
        found = asyncio.run(_measure(folder, arguments, names, repeat))
        results[without or "all"] = found
        rates = ", ".join(f"{load} {rate:,.0f}" for load, rate in found.items())
        print_note(f"{case} without {without or 'none'}: {rates}")
    every = results.pop("all")
    rows = [
        (load, number(every[load]), *[f"{every[load] / one[load]:.2f}" for one in results.values()])
        for load in LOADS
    ]
    title = f"{case}: rate with all accelerations, and the gain of each"
    table(title, ("load", "all", *results), rows)
    document = {"machine": machine(), "case": case, "all": every, "without": results}
    write_json(json, document, [])


if __name__ == "__main__":
    typer.run(main)
