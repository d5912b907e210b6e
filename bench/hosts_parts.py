"""The measurement of ``bench.hosts``, in its own process (see ``parts``). The tests use it too."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import sglrl
from sglrl.core.invariants import validate

from .fault_cases import CASES
from .fault_load import Load
from .faults_parts import with_answers
from .host_faults import HEARTBEAT_SECONDS, HostStriker, Machine, schedule
from .network import star
from .parts import Note, serve_part

_HOSTS = 3
_WORKERS = 6
_NOTE_SECONDS = 2.0


async def measure(
    *, faults: int, gap: float, in_flight: int, seed: int, delay: float, loss: float, note: Note
) -> dict[str, Any]:
    """Put a pool on three hosts under load, inject faults, and return the outcome of the calls.

    Each note begins with the number of faults so far.

    Args:
        gap: average seconds between two faults.
        delay: of each packet, in seconds.
        loss: share of the packets that are lost.
    """
    case = CASES["fake"]._replace(in_flight=in_flight)
    note("0 faults; starting")
    with star(_HOSTS, delay=delay, loss=loss) as (here, others):
        async with sglrl.Hosts(
            f"tcp://{here.address}:*",
            insecure=True,
            at_least=_HOSTS,
            heartbeat_timeout=HEARTBEAT_SECONDS,
        ) as hosts:
            names = [f"host-{n}" for n in range(_HOSTS)]
            machines = [
                Machine(other, name, hosts.address)
                for other, name in zip(others, names, strict=True)
            ]
            async with sglrl.launch(
                "fake", hosts=hosts, replicas=_WORKERS, restarts=10**9, **case.arguments()
            ) as client:
                prompts, answers = await with_answers(case, client, seed)
                load = Load(client, prompts, answers, in_flight=in_flight, tolerance=0.0)
                striker = HostStriker(client, hosts, here, machines)
                begun = time.monotonic()
                async with asyncio.TaskGroup() as group:
                    calls = group.create_task(load.run())
                    notes = group.create_task(_notes(load, striker, note))
                    try:
                        troubles = await striker.run(schedule(seed, faults, gap))
                    finally:
                        notes.cancel()
                        load.stop()
                    await calls
                driver = client.pool.driver
                validate(driver.fabric)
                if driver.fabric.calls:
                    troubles.append(f"{len(driver.fabric.calls)} calls are left in the tables")
                books = load.books
                return {
                    "faults": dict(striker.faults),
                    "seconds": time.monotonic() - begun,
                    "submitted": books.submitted,
                    "answered": books.answered,
                    "lost": books.lost,
                    "duplicated": books.duplicated,
                    "wrong": books.wrong,
                    "resumed": books.resumed,
                    "tokens": books.tokens,
                    "reasons": dict(books.reasons),
                    "troubles": troubles,
                    "flawless": books.flawless and not troubles,
                }


async def _notes(load: Load, striker: HostStriker, note: Note) -> None:
    while True:
        books = load.books
        note(
            f"{striker.faults.total()} faults; {books.answered:,} calls answered, {books.lost} "
            f"lost, {books.duplicated} duplicated, {books.wrong} wrong"
            + "".join(f"; {count} x {text}" for text, count in books.reasons.items())
        )
        await asyncio.sleep(_NOTE_SECONDS)


def _faults(options: Mapping[str, Any], note: Note) -> dict[str, Any]:
    import uvloop

    return uvloop.run(measure(**options, note=note))


if __name__ == "__main__":
    serve_part({"faults": _faults})
