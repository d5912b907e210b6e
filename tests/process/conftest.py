"""After each test: no task on its loop, no worker, no pool folder."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
from processes import descendants

from sglrl import forkserver


@pytest.fixture(autouse=True)
def no_worker_is_left() -> Iterator[None]:
    yield
    servers = [s for s in forkserver._servers.values() if s.alive]
    known = {s.process.pid for s in servers}
    left = {
        pid: name
        for pid, name in descendants().items()
        if pid not in known and name != "sglrl spare"
    }
    assert not left, f"processes were left running: {left}"
    for server in servers:
        assert not list(server.folder.glob("pool-*")), "a pool left its folder"


@pytest.fixture(autouse=True)
async def no_task_is_left() -> AsyncIterator[None]:
    yield
    left = asyncio.all_tasks() - {asyncio.current_task()}
    assert not left, f"tasks were left running: {left}"
