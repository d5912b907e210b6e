"""The report of a failed test names it, whatever the test left to the garbage collector."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
FAILS = '''
import gc
import pytest


class Unclosed:
    """An object in a cycle. Its finalizer raises, and leaves the next one."""

    def __init__(self):
        self.me = self

    def __del__(self):
        Unclosed()
        raise RuntimeError("unclosed")


@pytest.fixture
def leaves():
    yield
    fail()


def fail():
    gc.set_threshold(1000)
    Unclosed()
    raise AssertionError("the reason")


def test_that_fails():
    fail()


def test_with_a_fixture_that_fails(leaves):
    pass


'''
# The more source there is to parse, the more objects a parse allocates.
FAILS += "".join(f"x_{i} = [({i} + 2) * 3, {{'a': {i}}}]\n" for i in range(2000))


def test_a_failed_test_that_left_finalizers_is_named(tmp_path: Path) -> None:
    (tmp_path / "test_fails.py").write_text(FAILS)
    program = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "failure_reports", "-p", "no:cacheprovider"),
            *("-p", "no:xdist", "-o", "addopts=-ra", "--rootdir", tmp_path, "test_fails.py"),
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert program.returncode == pytest.ExitCode.TESTS_FAILED, program.stdout + program.stderr
    for line in (
        "FAILED test_fails.py::test_that_fails - AssertionError: the reason",
        "ERROR test_fails.py::test_with_a_fixture_that_fails - AssertionError: the reason",
    ):
        assert line in program.stdout
