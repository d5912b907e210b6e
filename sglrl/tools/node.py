"""The command ``sglrl node``, which offers a machine's GPUs to a program on another machine."""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import sys
from typing import Annotated

import msgspec
import typer

from ..config import HEARTBEAT_TIMEOUT
from ..errors import UsageError
from ..wire.codec import malformed
from ..wire.processes import ClientKeys


def node(
    address: Annotated[
        str | None, typer.Argument(help="Address of the program: tcp://HOST:PORT.")
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Wait here for programs, with Hosts(nodes=...), instead of connecting to one.",
        ),
    ] = None,
    keys: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="Folder with the node's secret key and driver.public. -: keys from the input.",
        ),
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Connect without keys. Nothing is encrypted.")
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
    reports when they exit, and kills them when the program ends. It then waits for the next
    program, until SIGTERM or Ctrl-C.
    """
    import uvloop

    from ..driver.environment import environment
    from ..hosts.listening import ListeningNode
    from ..hosts.node import Node, NodeSettings
    from ..launching.launch import cuda_devices
    from ..transport.addresses import check_tcp, is_loopback
    from ..transport.curve_keys import keys_of_listening_node, read_client_keys

    if address is None and listen is None:
        raise UsageError("name the address of a program, or one for --listen")
    if address is not None and listen is not None:
        raise UsageError(
            "a node connects to a program or listens: ADDRESS and --listen exclude each other"
        )
    where = address or listen or ""
    check_tcp(where, "this node" if listen else "a program", listens=bool(listen))
    if keys is None and not insecure and not is_loopback(where):
        raise UsageError(
            "connections beyond this machine need keys: make a pair on the program's machine with "
            "'sglrl keys DIR --add NAME', copy driver.public and NAME.secret here, and pass --keys "
            "(--insecure accepts any program, unencrypted)"
        )
    settings = NodeSettings(
        address=address or "",
        keys=None
        if keys is None
        else _keys_from_input()
        if keys == "-"
        else read_client_keys(keys),
        name=name or socket.gethostname(),
        gpus=_chosen(gpus, cuda_devices()),
        cores=len(os.sched_getaffinity(0)),
        orphan_timeout=orphan_timeout,
        heartbeat_timeout=heartbeat_timeout,
    )
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    logger = logging.getLogger("sglrl.node")
    logger.info(
        "%s offers %d GPUs and %d cores%s",
        settings.name,
        len(settings.gpus),
        settings.cores,
        f" to {address}" if address else "",
    )

    async def serve() -> None:
        import asyncio

        running: Node | ListeningNode
        if listen is None:
            running = Node(settings, environment())
        else:
            own = None if settings.keys is None else keys_of_listening_node(settings.keys)
            running = ListeningNode(listen, own, settings, environment())
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, running.stop)
        await running.run()
        logger.info("%s has ended", settings.name)

    uvloop.run(serve())


def _keys_from_input() -> ClientKeys:
    """Read the keys from standard input. A program that starts a node writes them there."""
    line = sys.stdin.buffer.readline()
    try:
        return msgspec.json.decode(line, type=ClientKeys)
    except msgspec.DecodeError as error:
        why = malformed(error, line)
        raise UsageError(f"--keys -: no keys arrive on the input: {why}") from None


def _chosen(gpus: str | None, visible: list[str]) -> tuple[str, ...]:
    """Return the visible GPUs that the option ``--gpus`` names.

    Args:
        gpus: the value of the option. None: all visible GPUs.
        visible: all visible GPUs.

    Raises:
        UsageError: the value is not a list of indices, or names a GPU that is not visible.
    """
    if gpus is None:
        return tuple(visible)
    indices: list[int] = []
    for part in filter(None, gpus.split(",")):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        named = range(int(match[1]), int(match[2] or match[1]) + 1) if match else ()
        if not named:
            raise UsageError(f"--gpus is a list such as 0,1 or 0-7, got {gpus!r}")
        indices += named
    if any(index >= len(visible) for index in indices):
        raise UsageError(f"--gpus {gpus} names others than the {len(visible)} GPUs of this machine")
    if len(set(indices)) != len(indices):
        raise UsageError(f"--gpus {gpus} names a GPU twice")
    return tuple(visible[index] for index in indices)
