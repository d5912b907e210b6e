"""One case of ``bench.faults``, in its own process (see ``parts``). The tests use it too."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import sglrl
from sglrl.core.invariants import validate

from .fault_cases import CASES, FaultCase
from .fault_load import Answer, Load, Prompt, Strike, fault_free
from .fault_schedule import FATAL, KILL, UPDATE, schedule
from .fault_strikes import Striker
from .parts import Note, serve_part

_NOTE_SECONDS = 1.0
_IDLE_SECONDS = 30.0


async def measure(case: FaultCase, model: str, seed: int, note: Note) -> dict[str, Any]:
    """Put a new pool under load, inject the faults, and return the outcome of the calls.

    Each note begins with the number of faults so far.
    """
    note("0 faults; starting")
    async with sglrl.launch(
        model,
        replicas=case.replicas,
        restarts=10**9,
        hang_timeout=case.hang_timeout,
        **case.arguments(),
    ) as client:
        prompts, answers = await with_answers(case, client, seed)
        load = Load(client, prompts, answers, in_flight=case.in_flight, tolerance=case.tolerance)
        update = None
        if case.shares.get(UPDATE):
            weights = weights_of(model)

            async def update() -> None:
                await client.update_weights(weights, timeout=5.0)

        striker = Striker(client, load, update=update)
        faults = schedule(seed, case.faults, case.gap, case.shares)
        begun = time.monotonic()
        async with asyncio.TaskGroup() as group:
            calls = group.create_task(load.run())
            notes = group.create_task(_notes(load, striker, note))
            try:
                await striker.run(faults)
            finally:
                notes.cancel()
                load.stop()
            await calls
        seconds = time.monotonic() - begun
        troubles = striker.missing or await _troubles(client, load)
        found = _summary(load, striker, seconds, troubles)
        return found | {"left_out": len(case.prompts(seed)) - len(prompts)}


async def with_answers(
    case: FaultCase, client: sglrl.Client, seed: int
) -> tuple[list[Prompt], list[Answer]]:
    """Return prompts with one right answer each, and these answers: a pool's without faults."""
    prompts = case.prompts(seed)
    if case.is_fake:
        return prompts, [_by_formula(prompt) for prompt in prompts]
    answers = await fault_free(client, prompts, case.in_flight, case.tolerance)
    pairs = [(p, a) for p, a in zip(prompts, answers, strict=True) if a is not None]
    return [prompt for prompt, _ in pairs], [answer for _, answer in pairs]


def _by_formula(prompt: Prompt) -> Answer:
    """Compute a fake engine's answer, see ``workers/engine/fake.py``."""
    count = prompt.options["max_new_tokens"]
    logprobs = (-(np.arange(count, dtype=np.float32) + 1) / 1024).astype("<f4")
    return Answer(np.resize(np.array(prompt.ids, dtype=np.int32), count), logprobs, "length")


def weights_of(model: str) -> dict[str, Any]:
    """Return the weights that the workers already have, so that an update changes no answer."""
    from safetensors.torch import load_file

    return {k: v for file in Path(model).glob("*.safetensors") for k, v in load_file(file).items()}


async def _notes(load: Load, striker: Striker, note: Note) -> None:
    while True:
        books = load.books
        note(
            f"{len(striker.strikes)} faults; {books.answered:,} calls answered, {books.lost} lost, "
            f"{books.duplicated} duplicated, {books.wrong} wrong"
        )
        await asyncio.sleep(_NOTE_SECONDS)


async def _troubles(client: sglrl.Client, load: Load) -> list[str]:
    """Describe everything that is wrong in a pool that should be idle."""
    found = []
    driver = client.pool.driver
    validate(driver.fabric)
    if driver.fabric.calls:
        found.append(f"{len(driver.fabric.calls)} calls are left in the driver's tables")
    prompt, answer = load.prompts[0], load.answers[0]
    for worker in client.workers:
        made = await client.generate(
            input_ids=prompt.ids, worker=worker.id, timeout=30, **prompt.options
        )
        if load.tolerance is not None and not np.array_equal(made.output_ids, answer.ids):
            found.append(f"worker {worker.id} answers otherwise than before")
    if len({worker.weight_version for worker in client.workers}) > 1:
        found.append("the workers' weights are of different versions")
    stats = await client.stats()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_IDLE_SECONDS):
            # An answered request may stay in the engine's batch for one more step.
            while any(s.engine.running or s.engine.waiting for s in stats):
                stats = await client.stats()
    if len(stats) != len(client.workers):
        found.append(f"only {len(stats)} workers of {len(client.workers)} are ready")
    found += [
        f"worker {s.worker} still runs {s.engine.running + s.engine.waiting} requests"
        for s in stats
        if s.engine.running or s.engine.waiting
    ]
    return found


def _summary(load: Load, striker: Striker, seconds: float, troubles: list[str]) -> dict[str, Any]:
    books = load.books
    fatal: dict[str, list[Strike]] = {}
    for strike in striker.strikes:
        if strike.kind in FATAL:
            fatal.setdefault(strike.kind, []).append(strike)
    kills = fatal.get(KILL, [])
    fatal["kill alone"] = [strike for strike in kills if strike.alone]
    away = [strike for strikes in (fatal.get(kind, []) for kind in FATAL) for strike in strikes]
    fatal["kill by itself"] = [
        strike for strike in fatal["kill alone"] if not any(_overlap(strike, o) for o in away)
    ]
    return {
        "faults": dict(Counter(strike.kind for strike in striker.strikes)),
        "seconds": seconds,
        "prompts": len(load.prompts),
        "submitted": books.submitted,
        "answered": books.answered,
        "lost": books.lost,
        "duplicated": books.duplicated,
        "wrong": books.wrong,
        "reasons": dict(books.reasons),
        "troubles": troubles,
        "streams": books.streams,
        "resumed": books.resumed,
        "losses": books.losses,
        "tokens": books.tokens,
        "recomputed": books.recomputed,
        "updates": striker.updates,
        "updates_refused": dict(striker.refused),
        "flawless": books.flawless and not troubles,
        # "first_ms": until the first token of any of the worker's streams. "stream_ms": until the
        # next token of each stream. "kill alone": kills after which no call could get to a stopped
        # worker. "kill by itself": such kills while no other worker was being replaced.
        "first_ms": {
            kind: _spread([min(s.waits) for s in strikes if s.waits])
            for kind, strikes in fatal.items()
        },
        "stream_ms": {
            kind: _spread([wait for s in strikes for wait in s.waits])
            for kind, strikes in fatal.items()
        },
        "back_ms": {
            kind: _spread([s.back for s in strikes if s.back is not None])
            for kind, strikes in fatal.items()
        },
    }


def _overlap(one: Strike, other: Strike) -> bool:
    if one is other:
        return False
    first, second = sorted((one, other), key=lambda strike: strike.at)
    return first.back is None or second.at < first.at + first.back


def _spread(seconds: list[float]) -> dict[str, float]:
    """Return count, median, 99th percentile and maximum, in milliseconds."""
    if not seconds:
        return {"count": 0}
    p50, p99, worst = (float(v) * 1e3 for v in np.percentile(seconds, (50, 99, 100)))
    return {"count": len(seconds), "p50": p50, "p99": p99, "max": worst}


def _case(options: Mapping[str, Any], note: Note) -> dict[str, Any]:
    import uvloop

    case = CASES[options["case"]]._replace(
        faults=options["faults"], in_flight=options["in_flight"], gap=options["gap"]
    )
    return uvloop.run(measure(case, case.model, options["seed"], note))


if __name__ == "__main__":
    serve_part({"case": _case})
