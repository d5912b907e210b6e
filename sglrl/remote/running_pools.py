"""Find the pools that run on this machine, so that ``sglrl top`` needs no address."""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
import time
from pathlib import Path
from typing import Final

import msgspec

from ..client.client import Client
from ..driver.pool import Pool
from ..driver.temporary_folders import PREFIX
from ..wire.processes import PoolEntry
from .server import PoolServer

_FILE: Final = "pool.json"
_numbers: Final = itertools.count(1)


class RunningPool(msgspec.Struct, frozen=True, kw_only=True):
    """How to connect to a pool of this machine.

    Attributes:
        name: what a user types to choose this pool: the process id of the program that launched
            it, such as "1234". Later pools of the same program are "1234.2", "1234.3" and so on.
        pid: the process that launched the pool.
        model: the model's folder or name.
        began: when the pool started, in seconds as ``time.time`` returns them.
        entry: the address and the keys. They are secret, so only this user can read the file.
    """

    name: str
    pid: int
    model: str
    began: float
    entry: PoolEntry


def serve_and_announce(pool: Pool, client: Client) -> PoolServer:
    """Serve a pool to other processes, and write how to connect to it into its folder.

    Only this user can read the folder, which is removed with the pool. A full disk must not stop a
    pool from starting, so an ``OSError`` is ignored; ``running_pools`` then does not find the pool.
    """
    server = PoolServer(pool, client)
    pid, number = os.getpid(), next(_numbers)
    announced = RunningPool(
        name=str(pid) if number == 1 else f"{pid}.{number}",
        pid=pid,
        model=client.model,
        began=time.time(),
        entry=server.entry,
    )
    with contextlib.suppress(OSError):
        path = pool.folder / _FILE
        path.touch(mode=0o600)
        path.write_bytes(msgspec.json.encode(announced))
    return server


def running_pools() -> list[RunningPool]:
    """Return the pools that this user runs on this machine, the latest first."""
    pools = []
    base = Path(tempfile.gettempdir())
    # A pool on this machine has its folder in the folder of the fork server.
    for path in (*base.glob(f"{PREFIX}*/{_FILE}"), *base.glob(f"{PREFIX}*/pool-*/{_FILE}")):
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            if path.stat().st_uid == os.getuid():
                pool = msgspec.json.decode(path.read_bytes(), type=RunningPool)
                # After SIGKILL, the folder remains until another program removes it.
                os.kill(pool.pid, 0)
                pools.append(pool)
    return sorted(pools, key=lambda pool: -pool.began)
