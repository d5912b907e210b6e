"""The command ``sglrl node``."""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
from pathlib import Path
from typing import Annotated

import typer

from ..config import HEARTBEAT_TIMEOUT
from ..errors import UsageError


def node(
    address: Annotated[str, typer.Argument(help="Of the program: tcp://HOST:PORT.")],
    keys: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="With the node's secret key and driver.public."),
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Without keys: the connection is not encrypted.")
    ] = False,
    gpus: Annotated[
        str | None,
        typer.Option(help="GPUs to offer, such as 0,1 or 0-7.", show_default="all visible ones"),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of this host.", show_default="its host name")
    ] = None,
    orphan_timeout: Annotated[
        float,
        typer.Option(min=0.0, help="Seconds to keep workers while the program is out of reach."),
    ] = 30.0,
    heartbeat_timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds of silence after which a link is broken.")
    ] = HEARTBEAT_TIMEOUT,
) -> None:
    """Offer this machine's GPUs and cores to a program on another machine.

    The program listens with sglrl.Hosts(address, keys=...). This command starts its workers here,
    reports when they exit, and kills them when the program ends. It runs until SIGTERM or Ctrl-C.
    """
    import uvloop

    from ..api.launching import cuda_devices
    from ..driver.environment import environment
    from ..hosts.node import Node, NodeSettings
    from ..transport.addresses import check_address
    from ..transport.curve_keys import read_client_keys

    if not address.startswith("tcp://") or not address.rpartition(":")[2].isdigit():
        raise UsageError(f"the address is tcp://HOST:PORT, got {address!r}")
    check_address(address, keys=keys is not None, insecure=insecure)
    settings = NodeSettings(
        address=address,
        keys=None if keys is None else read_client_keys(keys),
        name=name or socket.gethostname(),
        gpus=_chosen(gpus, cuda_devices()),
        cores=len(os.sched_getaffinity(0)),
        orphan_timeout=orphan_timeout,
        heartbeat_timeout=heartbeat_timeout,
    )
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    logging.getLogger("sglrl.node").info(
        "%s offers %d GPUs and %d cores to %s",
        settings.name,
        len(settings.gpus),
        settings.cores,
        address,
    )

    async def serve() -> None:
        import asyncio

        running = Node(settings, environment())
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, running.stop)
        await running.run()

    uvloop.run(serve())


def _chosen(gpus: str | None, visible: list[str]) -> tuple[str, ...]:
    """Return the GPUs that ``--gpus`` names, of those that are visible.

    Raises:
        UsageError: it names others, or is not a list of indices.
    """
    if gpus is None:
        return tuple(visible)
    indices: list[int] = []
    for part in filter(None, gpus.split(",")):
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        named = range(int(found[1]), int(found[2] or found[1]) + 1) if found else ()
        if not named:
            raise UsageError(f"--gpus is a list such as 0,1 or 0-7, got {gpus!r}")
        indices += named
    wrong = [index for index in indices if index >= len(visible)]
    if wrong or len(set(indices)) != len(indices):
        raise UsageError(f"--gpus {gpus} must name different ones of the {len(visible)} GPUs")
    return tuple(visible[index] for index in indices)
