"""A program that is killed with its fork server leaves a folder, which the next one removes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from processes import descendants, wait_for_end

from sglrl.driver.temporary_folders import make_folder, remove_folder

PROGRAM = """
import asyncio
import sglrl

class Echo(sglrl.Actor):
    @sglrl.endpoint
    async def echo(self, text: str) -> str:
        return text

async def main():
    async with sglrl.spawn(Echo) as echo:
        print("started", flush=True)
        while line := await asyncio.to_thread(input):
            print(await echo.echo(line), flush=True)

asyncio.run(main())
"""


class Program:
    """A program with one actor that returns each line."""

    def __init__(self, folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            env={**os.environ, "TMPDIR": str(folder)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            start_new_session=True,
        )
        assert self.read() == "started"

    def read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def echo(self, text: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{text}\n")
        self.process.stdin.flush()
        return self.read()

    def kill(self) -> None:
        """Kill the program and all its processes at once, as a container's end does."""
        pids = [self.process.pid, *descendants(self.process.pid)]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        self.process.communicate()
        assert wait_for_end(pids, 10.0) == []

    def end(self) -> None:
        self.process.communicate("\n", timeout=30.0)
        assert self.process.returncode == 0


@pytest.fixture
def folder() -> Iterator[Path]:
    """Return a folder with a short path. Sockets in a long one would be elsewhere."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


def test_the_next_program_removes_the_folder_of_a_killed_one(folder: Path) -> None:
    running = Program(folder)
    (own,) = folder.iterdir()
    killed = Program(folder)
    killed.kill()
    assert len([*folder.iterdir()]) == 2, "the killed program has left its folder"
    foreign = folder / "sglrl-of-another-version"
    foreign.mkdir()
    following = Program(folder)
    assert len([*folder.iterdir()]) == 3
    assert {own, foreign} < {*folder.iterdir()}
    # The folder of a running program stays, and still works.
    assert (running.echo("a"), following.echo("b")) == ("a", "b")
    running.end()
    following.end()
    assert [*folder.iterdir()] == [foreign]


def test_folders_are_not_removed_while_others_make_theirs(tmp_path: Path) -> None:
    """Threads have locks of their own, as processes do."""

    def make_many(number: int) -> None:
        for _ in range(100):
            folder = make_folder(f"{number}-", str(tmp_path))
            (folder / "file").touch(exist_ok=False)
            remove_folder(folder, os.getpid())
            assert not folder.exists()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(make_many, range(8)))
    assert [*tmp_path.iterdir()] == []


def test_a_fork_does_not_remove_the_folder(tmp_path: Path) -> None:
    folder = make_folder(base=str(tmp_path))
    pid = os.fork()
    if not pid:
        remove_folder(folder, os.getppid())
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    # The exit of the fork has not released the lock.
    other = make_folder(base=str(tmp_path))
    assert folder.exists()
    for made in (folder, other):
        remove_folder(made, os.getpid())


@pytest.mark.parametrize("what", ["link", "file"])
def test_what_is_not_a_folder_of_ours_stays(tmp_path: Path, what: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "lock").touch()
    base = tmp_path / "base"
    base.mkdir()
    if what == "link":
        (base / "sglrl-link").symlink_to(elsewhere)
    else:
        (base / "sglrl-file").touch()
    made = make_folder(base=str(base))
    assert len([*base.iterdir()]) == 2
    assert [*elsewhere.iterdir()] == [elsewhere / "lock"]
    remove_folder(made, os.getpid())
