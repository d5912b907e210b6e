"""``python -m bench.hosts``: a pool on three hosts under load, with faults of hosts and links.

The hosts are network namespaces of this machine, joined by a bridge, so the bench needs root. Links
break for a short or a long time, or in one direction. Nodes and workers are killed, and the program
itself is stopped. The bench reports the outcome of every call. The tests use ``measure`` too.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Annotated, Any

import msgspec
import typer

import sglrl

from .fault_cases import CASES
from .fault_schedule import HOST_SHARES, schedule
from .faults import print_outcomes
from .host_faults import HEARTBEAT_SECONDS, HostStriker, Machine
from .network import star
from .parts import Note
from .report import Json, Report

_HOSTS = 3
_WORKERS = 6


def main(
    json: Json = None,
    faults: Annotated[int, typer.Option(min=1, help="How many.")] = 200,
    gap: Annotated[float, typer.Option(min=0.1, help="Seconds between them, on average.")] = 3.0,
    in_flight: Annotated[int, typer.Option(min=1, help="Callers.")] = 24,
    seed: Annotated[int, typer.Option(help="Of the schedule and the prompts.")] = 0,
    delay: Annotated[
        float, typer.Option(min=0, help="Milliseconds that each packet takes longer.")
    ] = 0.0,
    loss: Annotated[float, typer.Option(min=0, max=50, help="Percent of packets lost.")] = 0.0,
) -> None:
    """Inject faults of hosts under load: count lost, duplicated and wrong calls."""
    report = Report("hosts", json)
    options = {"faults": faults, "gap": gap, "in_flight": in_flight, "seed": seed}
    options |= {"delay": delay / 1000, "loss": loss / 100}
    title = "three hosts"
    result = report.measure({title: partial(measure, **options)}, limit=3600.0).get(title)
    if result:
        print_outcomes(report, title, result, faults)
    report.finish(ok=bool(result and result["flawless"]), options=options, result=result)


async def measure(
    note: Note, *, faults: int, gap: float, in_flight: int, seed: int, delay: float, loss: float
) -> dict[str, Any]:
    """Put a pool on three hosts under load, inject faults, and return the figures.

    Args:
        note: shows the user what runs.
        faults: number of faults.
        gap: average seconds between two faults.
        in_flight: number of callers.
        seed: the seed of the schedule and the prompts.
        delay: the additional delay of each packet, in seconds.
        loss: the share of the packets that are lost.
    """
    case = CASES["fake"]._replace(in_flight=in_flight)
    note("starting")
    with star(_HOSTS, delay=delay, loss=loss) as (here, others):
        async with sglrl.Hosts(
            f"tcp://{here.address}:*",
            insecure=True,
            at_least=_HOSTS,
            heartbeat_timeout=HEARTBEAT_SECONDS,
        ) as hosts:
            machines = [
                Machine(other, f"host-{n}", hosts.address) for n, other in enumerate(others)
            ]
            async with case.launch(hosts=hosts, replicas=_WORKERS, hang_timeout=120.0) as client:
                load = await case.load(client, seed)
                striker = HostStriker(client, hosts, here, machines)
                begun = time.monotonic()
                async with load.running(striker.faults.total, note):
                    troubles = await striker.run(schedule(seed, faults, gap, HOST_SHARES))
                troubles += load.left_over()
                return {
                    "faults": dict(striker.faults),
                    "seconds": time.monotonic() - begun,
                    **msgspec.to_builtins(load.outcomes),
                    "troubles": troubles,
                    "flawless": load.outcomes.flawless and not troubles,
                }


if __name__ == "__main__":
    typer.run(main)
