"""The system has no more processes, threads or inodes: the program reports this and a remedy.

A program is run with a little more of the resource each time, until it works. In between it must
never fail in another way.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

PROGRAM = """
import asyncio, sys, tempfile
import sglrl

async def main():
    async with sglrl.launch("fake", engine="fake") as client:
        made = await client.generate(input_ids=[7], max_new_tokens=1)
        print("made", made.output_ids.tolist())

# As it is when the program has used the folder before.
tempfile.tempdir = sys.argv[1]
try:
    asyncio.run(main())
except sglrl.SglrlError as error:
    print(f"{type(error).__name__}: {error}")
"""


def run(*before: str, folder: Path | str) -> str:
    """Run the program with the command prefix ``before``, and return its output."""
    done = subprocess.run(
        [*before, sys.executable, "-c", textwrap.dedent(PROGRAM), str(folder)],
        cwd="/",
        env={**os.environ, "TMPDIR": str(folder), "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, (done.returncode, done.stdout, done.stderr)
    return done.stdout


def works(*command: str) -> bool:
    if shutil.which(command[0]) is None:
        return False
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


NAMESPACE = ("unshare", "--user", "--map-root-user", "--mount")


def test_a_folder_without_free_inodes(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("d")
    mount = f"mount -t tmpfs -o nr_inodes=$0 sglrl {folder}"
    if not works(*NAMESPACE, "sh", "-c", mount, "9"):
        pytest.skip("no file system can be mounted here")
    for inodes in range(1, 20):
        out = run(*NAMESPACE, "sh", "-c", f'{mount} && exec "$@"', str(inodes), folder=folder)
        if out == "made [7]\n":
            break
        assert out.startswith(("WorkerStartError: ", "UsageError: "))
        assert f"{folder}" in out
        assert "No space left on device" in out
        assert "TMPDIR" in out
    assert inodes > 5
    assert out == "made [7]\n"


def test_a_folder_that_cannot_be_written(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("d")
    mount = f"mount -t tmpfs -o ro sglrl {folder}"
    if not works(*NAMESPACE, "sh", "-c", mount):
        pytest.skip("no file system can be mounted here")
    out = run(*NAMESPACE, "sh", "-c", f'{mount} && exec "$@"', "sh", folder=folder)
    assert out.startswith(f"WorkerStartError: no folder for sockets can be made in {folder} (Rea")
    assert "set TMPDIR" in out


def test_a_folder_that_is_not_there() -> None:
    out = run(folder="/nowhere")
    assert out.startswith("WorkerStartError: no folder for sockets can be made in /nowhere (No s")
    assert "set TMPDIR" in out


def test_a_folder_whose_name_is_too_long_for_sockets(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    assert run(folder=folder) == "made [7]\n"


def test_a_socket_whose_name_is_too_long(tmp_path: Path) -> None:
    program = PROGRAM.replace(
        'engine="fake"', f'engine="fake", address="ipc://{tmp_path}/{"x" * 108}"'
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "/tmp"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "UsageError: sglrl cannot listen on ipc://" in done.stdout
    assert "File name too long; the path of a socket has at most 107 bytes" in done.stdout


CAPABILITY = "+dac_read_search"
"""Lets the other user read the tests' files, which may be readable for root only."""


def limited(processes: int) -> tuple[str, ...]:
    """Return a command prefix for another user with a process limit; root has no such limit."""
    user = 60_000 + os.getpid() % 5000
    as_user = ("setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups")
    able = (f"--inh-caps={CAPABILITY}", f"--ambient-caps={CAPABILITY}")
    return (*as_user, *able, "prlimit", f"--nproc={processes}")


def test_no_more_processes() -> None:
    if not works(*limited(9), sys.executable, "-c", ""):
        pytest.skip("no command can be run as another user here")
    for processes in range(1, 40):
        out = run(*limited(processes), folder="/tmp")
        if out == "made [7]\n":
            break
        assert out.startswith("WorkerStartError: ")
        assert f"the limit of processes and threads is reached (ulimit -u is {processes}" in out
        assert "SIGABRT" not in out
    assert processes > 6
    assert out == "made [7]\n"


def test_the_threads_of_a_check_are_gone_when_it_returns() -> None:
    """They would count while a library starts its own threads."""
    program = """
        import os
        from sglrl.transport.system_limits import check_threads

        for _ in range(1000):
            check_threads(4)
            assert len(os.listdir("/proc/self/task")) == 1
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=300)
