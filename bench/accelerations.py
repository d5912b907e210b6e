"""``python -m bench.accelerations``: measure what each acceleration of SGLang gains.

First an engine runs with all accelerations. Then, for each acceleration, an engine runs with all
others. Every engine has the same four loads. The gain of an acceleration is the rate with all
accelerations, divided by the rate without this one.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Annotated

import typer

import sglrl

from .cases import CASES
from .parts import Note, Part
from .report import Json, Report, ratio

Load = Callable[[sglrl.Client, int], Awaitable[int]]
"""Runs one repetition, and returns its number of units: tokens, turns or queries."""

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
    """Run 64 tasks. Each asks for the 100 likeliest tokens and appends one of them, 32 times."""

    async def ask(number: int) -> None:
        ids = _ids((repetition, number), 32)
        for _ in range(32):
            answer = await client.next_token_logprobs(ids, top_k=100)
            assert answer.token_ids is not None
            ids.append(int(answer.token_ids[0]) % 512)

    await asyncio.gather(*[ask(number) for number in range(64)])
    return 64 * 32


LOADS: dict[str, Load] = {
    "decode, tokens/s": _decode,
    "groups of 8, tokens/s": _groups,
    "short turns/s": _turns,
    "next-token queries/s": _queries,
}


async def measure(note: Note, *, case: str, names: Sequence[str], repeats: int) -> dict[str, float]:
    """Return the median rate of each load on an engine with the accelerations ``names``."""
    rates: dict[str, float] = {}
    chosen = CASES[case]._replace(in_flight=256)
    async with chosen.launch(accelerations=list(names)) as client:
        for load, run in LOADS.items():
            note(load)
            measured = []
            for repetition in range(repeats + 1):
                await client.flush_cache()
                begun = time.perf_counter()
                units = await run(client, repetition)
                measured.append(units / (time.perf_counter() - begun))
            # The first repetition is the warm-up.
            rates[load] = statistics.median(measured[1:])
    return rates


def main(
    case: Annotated[str, typer.Option(help="tiny-cpu, 0.6b or 8b.")] = "0.6b",
    without: Annotated[
        list[str] | None, typer.Option(help="Only without this acceleration; repeatable.")
    ] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Repetitions; the median counts.")] = 3,
    json: Json = None,
) -> None:
    """Measure four loads with all accelerations, and without each of them."""
    report = Report("accelerations", json)
    known = (*_NAMES, "parameter_arena")
    plan: dict[str, Part] = {
        name or "all": partial(
            measure, case=case, names=[one for one in known if one != name], repeats=repeat
        )
        for name in ("", *(without or _NAMES))
    }
    results = report.measure(plan, env=CASES[case].environment)
    every = results.pop("all", {})
    report.table(
        f"{case}: rate with all accelerations, and the gain of each",
        ("load", "all", *results),
        [
            (
                load,
                every.get(load),
                *[ratio(every.get(load), one[load]) for one in results.values()],
            )
            for load in LOADS
        ],
    )
    report.finish(case=case, all=every, without=results)


if __name__ == "__main__":
    typer.run(main)
