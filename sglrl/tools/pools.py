"""Choose a running pool on the command line, and connect to it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Final

import typer

from ..errors import UsageError

if TYPE_CHECKING:
    # The client is imported later, so that other commands start faster.
    from ..client.client import Client

POOL_VARIABLE: Final = "SGLRL_POOL"
_CONNECT_SECONDS: Final = 10.0

PoolArgument = Annotated[
    str | None,
    typer.Argument(
        envvar=POOL_VARIABLE,
        help="client.address, or the process id of a program of yours on this machine.",
        show_default="the pool that runs on this machine",
    ),
]
KeysOption = Annotated[
    str | None, typer.Option(help="Folder or file of the client's keys, for another machine.")
]


def connect_to(pool: str | None, keys: str | None, timeout: float | None = 10.0) -> Client:
    """Return a client of a running pool. It connects when it is awaited.

    Args:
        pool: an address, the name of a pool of this user on this machine, or None if only one runs.
        keys: the folder or file of the client's keys.
        timeout: the seconds that the pool may take for an answer. None: no limit.

    Raises:
        UsageError: no pool has this name, or several pools run and none was chosen.
    """
    from ..remote.client import client_of, connect
    from ..remote.pool import RemotePool
    from ..remote.running_pools import running_pools

    if pool is not None and "://" in pool:
        return connect(pool, keys=keys, timeout=timeout, connect_timeout=_CONNECT_SECONDS)
    if keys is not None:
        raise UsageError("--keys needs the address of a pool on another machine")
    running = running_pools()
    chosen = [one for one in running if pool in (None, one.name)]
    if len(chosen) == 1:
        return client_of(RemotePool(chosen[0].entry, _CONNECT_SECONDS), model="", timeout=timeout)
    known = "".join(
        f"\n  {one.name}  {one.model}, started at {_clock(one.began)}" for one in running
    )
    if chosen:
        raise UsageError(f"several pools run on this machine; choose one:{known}")
    if pool is None:
        raise UsageError(
            "no pool of this user runs on this machine; pass client.address of a pool elsewhere"
        )
    found = f"these run on this machine:{known}" if known else "none runs on this machine"
    raise UsageError(f"{pool!r} is neither an address nor a pool of this user; {found}")


def _clock(at: float) -> str:
    return time.strftime("%H:%M", time.localtime(at))
