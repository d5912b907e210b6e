"""Nothing may outlive the test run: every process that a test has started is gone at the end, once
the fork servers, of which a program has one of a kind, have ended as at interpreter exit."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator

import pytest
from processes import descendants

# A shell that runs the tests in the background has SIGINT ignored, and children inherit that: the
# programs that tests interrupt, too.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def no_process_is_left() -> Iterator[None]:
    before = set(descendants())
    yield
    forkserver = sys.modules.get("sglrl.forkserver")
    if forkserver is None:
        return
    folders = [server.folder for server in forkserver._servers.values()]
    forkserver.shutdown_fork_servers()
    left = {pid: name for pid, name in descendants().items() if pid not in before}
    assert not left, f"processes were left running: {left}"
    assert not [folder for folder in folders if folder.exists()]
