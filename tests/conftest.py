"""Nothing may outlive the test run: every process that a test has started is gone at the end, once
the fork servers, of which a program has one of a kind, have ended as at interpreter exit."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings
from processes import descendants

# On a busy machine an example may take any time. The time limit of pytest ends one that hangs.
settings.register_profile("sglrl", deadline=None)
settings.load_profile("sglrl")

# A shell that runs the tests in the background has SIGINT ignored, and children inherit that: the
# programs that tests interrupt, too.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """In two processes (``pytest -n 2 --dist loadscope``): beside most of those that share a fork
    server for SGLang run all others, in about the same time."""
    if config.getoption("dist") != "loadscope":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class ByFolder(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            engines = "/engine/" in file and not file.endswith("/test_weight_faults.py")
            return "engines" if engines else "others"

    return ByFolder(config, log)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Of tests that were asked for by name, those that run alone or the others may be none."""
    by_mark = session.config.getoption("markexpr") in ("alone", "not alone")
    if by_mark and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.OK


@pytest.fixture(scope="session", autouse=True)
def no_process_is_left() -> Iterator[None]:
    before = set(descendants())
    yield
    fork_server = sys.modules.get("sglrl.driver.fork_server")
    if fork_server is None:
        return
    folders = [server.folder for server in fork_server._servers.values()]
    fork_server.shutdown_fork_servers()
    left = {pid: name for pid, name in descendants().items() if pid not in before}
    assert not left, f"processes were left running: {left}"
    assert not [folder for folder in folders if folder.exists()]
