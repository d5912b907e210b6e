"""The command ``sglrl top``."""

from __future__ import annotations

import importlib.util
import os
import shlex
import sys
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from ...config import install
from ...errors import Closed, UsageError
from ..display import print_json
from ..pools import POOL_VARIABLE, KeysOption, PoolArgument, connect_to

if TYPE_CHECKING:
    from ...client.client import Client
    from ...control.snapshot import Snapshot


def top(
    pool: PoolArgument = None,
    keys: KeysOption = None,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two snapshots.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one snapshot and exit.")] = False,
    json: Annotated[bool, typer.Option("--json", help="With --once: print JSON.")] = False,
    web: Annotated[
        bool, typer.Option("--web", help="Serve the same screen to a browser on this machine.")
    ] = False,
    port: Annotated[int, typer.Option(min=1, max=65_535, help="The port of --web.")] = 8765,
) -> None:
    """Watch a running pool: workers, weights, rollouts, gateway sessions and hosts.

    Keys in the list of workers: s shows stacks, d drains, r restarts, k kills (d, r and k ask
    first); p pauses the pool, u resumes it, q quits.
    """
    if json and not once:
        raise UsageError("--json needs --once")
    if web and once:
        raise UsageError("--web shows a screen, and --once prints one snapshot: give one of them")
    if not once:
        module = "textual_serve" if web else "textual"
        if importlib.util.find_spec(module) is None:
            raise UsageError(f"sglrl top needs {module}: {install('top')}; --once does not")
    if web:
        _serve(pool, keys, interval, port)
        return
    import uvloop

    client = connect_to(pool, keys)
    if once:
        snapshot = uvloop.run(_snapshot(client))
        if json:
            print_json(msgspec.json.format(msgspec.json.encode(snapshot)))
        else:
            _print(snapshot)
        return
    ended = uvloop.run(_watch(client, interval))
    if ended is not None:
        raise Closed(ended)


async def _snapshot(client: Client) -> Snapshot:
    async with client:
        return await client.snapshot()


async def _watch(client: Client, interval: float) -> str | None:
    from .app import Top

    async with client:
        ended: str | None = await Top(client, interval).run_async()
    return ended


def _print(snapshot: Snapshot) -> None:
    from .tables import fitting, headline, tables_of

    console = Console()
    console.print(headline(snapshot), markup=False, highlight=False)
    for title, table in tables_of(snapshot).items():
        if table.rows:
            fits = fitting(table, console.width)
            shown = RichTable(*fits.columns, title=title, title_justify="left", box=None)
            for row in fits.rows:
                shown.add_row(*map(escape, row))
            console.print(shown)


def _serve(pool: str | None, keys: str | None, interval: float, port: int) -> None:
    from .web import GuardedServer

    # Other users can read command lines, and the address has a secret.
    if pool is not None:
        os.environ[POOL_VARIABLE] = pool
    command = [sys.executable, "-m", "sglrl", "top", "--interval", str(interval)]
    command += ["--keys", keys] if keys is not None else []
    GuardedServer(shlex.join(command), "127.0.0.1", port, "sglrl top").serve()
