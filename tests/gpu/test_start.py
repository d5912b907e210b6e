"""On a machine with a GPU, the fork server imports SGLang for all workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglrl.driver.fork_server import ForkConnection, ForkServer, fork_server

pytestmark = [pytest.mark.gpu, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]


async def test_a_fork_server_imports_sglang() -> None:
    """A server that cannot do so starts anew, with another kind in its command line."""
    server = fork_server("sglang-cuda")
    connection = await ForkConnection.open(server, lambda *_: None, lambda *_: None, 200.0)
    connection.close()
    assert "sglang-cuda" in command(server), server.log.read_text()


def command(server: ForkServer) -> list[str]:
    return Path(f"/proc/{server.process.pid}/cmdline").read_text().split("\0")
