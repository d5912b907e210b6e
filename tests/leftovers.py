"""Fixtures that check what a test has left: tasks, worker processes and pool folders."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from processes import descendants, wait_for_end

from sglrl.driver import fork_server


@pytest.fixture(autouse=True)
def no_worker_is_left() -> Iterator[None]:
    """Check that the test left no worker process and no pool folder.

    Fixtures that outlive the test may keep theirs, when other tests run in the same process.
    """
    before = set(descendants()), _pools()
    yield
    known = {server.process.pid for server in fork_server._servers.values() if server.alive}

    def others() -> dict[int, str]:
        return {
            pid: name
            for pid, name in descendants().items()
            if pid not in known | before[0] and name != "sglrl spare"
        }

    left = others()
    if unnamed := [pid for pid, name in left.items() if not name.startswith("sglrl")]:
        # A spare that a fork server has just forked has no name yet.
        wait_for_end(unnamed, 5.0)
        left = others()
    assert not left, f"processes were left running: {left}"
    assert not _pools() - before[1], "a pool left its folder"


def _pools() -> set[Path]:
    servers = [server for server in fork_server._servers.values() if server.alive]
    return {pool for server in servers for pool in server.folder.glob("pool-*")}


@pytest.fixture(autouse=True)
async def no_task_is_left() -> AsyncIterator[None]:
    yield
    left = asyncio.all_tasks() - {asyncio.current_task()}
    assert not left, f"tasks were left running: {left}"
