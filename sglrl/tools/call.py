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
from .pools import KeysOption, connect_to


def call(
    pool: Annotated[
        str | None,
        typer.Argument(
            help="client.address, or the process id of a program of yours; none: list operations."
        ),
    ] = None,
    operation: Annotated[str | None, typer.Argument(help="Such as pause, stats, sleep.")] = None,
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME=VALUE]...", help="JSON values, or text.")
    ] = None,
    keys: KeysOption = None,
) -> None:
    """Run an operation on a pool that another program has launched, and print its result as JSON.

    For example: sglrl call 1234 pause mode=retract
    """
    # The client is imported here, so that other commands start faster.
    from ..client.client import Client
    from ..control.operations import public_operations

    known = public_operations(Client)
    if pool is None or operation is None:
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
    result = asyncio.run(_run(pool, keys, operation, checked))
    print_json(msgspec.json.encode({"result": result}, enc_hook=str))


async def _run(pool: str, keys: str | None, name: str, arguments: msgspec.Struct) -> Any:
    async with connect_to(pool, keys, timeout=None) as client:
        return await getattr(client, name)(**msgspec.structs.asdict(arguments))


def _argument(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"arguments are NAME=VALUE, got {text!r}")
    try:
        return name, msgspec.json.decode(value)
    except msgspec.DecodeError:
        return name, value
