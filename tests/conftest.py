"""Check that every process that a test has started has exited at the end of the test run.

A program has one fork server of each kind. The check first stops them, as interpreter exit does.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import failure_reports
import pytest
from hypothesis import settings
from processes import descendants

# On a busy machine an example may take any time. The time limit of pytest stops a hanging example.
settings.register_profile("sglrl", deadline=None)
settings.load_profile("sglrl")

# A shell that runs the tests in the background ignores SIGINT. Children inherit that, including the
# programs that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(failure_reports)
    if importlib.util.find_spec("sglang") is not None:
        config.pluginmanager.import_plugin("engine.fixtures")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return how many tests run at a time with ``-n logical`` or ``-n auto``.

    "logical": as many as there are cores, for tests that compute. "auto": two more, for tests that
    often wait for other processes. At most eight, because a test with engines needs up to 3 GB.
    """
    cores = len(os.sched_getaffinity(0))
    return min(cores + 2 * (config.option.numprocesses == "auto"), 8)


LONG_FILES = (
    "weights/test_random_updates.py",
    "documents/test_examples.py",
    "benchmarks/test_bench.py",
    "hosts/test_engine_nodes.py",
    "tools/test_eval.py",
    "hosts/test_links.py",
    "tools/test_commands.py",
    "remote/test_links.py",
    "rollouts/test_agents_that_hang.py",
    "tools/test_cli.py",
    "transport/test_heartbeats.py",
)
"""Files that take from half a minute to two minutes, and would be among the last ones."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with long files, so that no process waits for one at the end."""
    tests = Path(__file__).parent
    order = {(tests / name).resolve(strict=True): rank for rank, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: order.get(item.path, len(order)))


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Accept an empty selection when tests are chosen by name and by the mark ``alone``."""
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
