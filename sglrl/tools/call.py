"""``sglrl call``: run an operation on a running pool."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from ..errors import UsageError
from .display import print_json


def call(
    address: Annotated[
        str | None, typer.Argument(help="client.address of the pool; none: list operations.")
    ] = None,
    operation: Annotated[str | None, typer.Argument(help="Such as pause, stats, sleep.")] = None,
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME=VALUE]...", help="JSON values, or text.")
    ] = None,
    keys: Annotated[
        str | None, typer.Option(help="Folder or file of the client's keys, for another machine.")
    ] = None,
) -> None:
    """Run an operation on a pool that another program has launched, and print its result as JSON.

    For example: sglrl call ADDRESS pause mode=retract
    """
    # The client is imported here, so that other commands start faster.
    from ..client.client import Client
    from ..control.operations import public_operations

    known = public_operations(Client)
    if address is None or operation is None:
        table = Table("operation", "arguments", "description", box=None)
        for name, spec in known.items():
            description = (getattr(Client, name).__doc__ or "").split("\n")[0]
            table.add_row(name, ", ".join(spec.signature.parameters), description)
        Console().print(table)
        return
    if operation not in known:
        raise UsageError(f"unknown operation {operation!r}; known: {', '.join(known)}")
    spec = known[operation]
    given = dict(_argument(text) for text in arguments or ())
    try:
        checked = msgspec.convert(given, spec.fields)
    except msgspec.ValidationError as error:
        raise UsageError(f"{operation}: {error}") from None
    result = asyncio.run(_run(address, keys, operation, checked))
    print_json(msgspec.json.encode({"result": result}, enc_hook=str))


async def _run(address: str, keys: str | None, name: str, arguments: msgspec.Struct) -> Any:
    from ..remote.client import connect

    async with connect(address, keys=keys) as client:
        return await getattr(client, name)(**msgspec.structs.asdict(arguments))


def _argument(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"arguments are NAME=VALUE, got {text!r}")
    try:
        return name, msgspec.json.decode(value)
    except msgspec.DecodeError:
        return name, value
