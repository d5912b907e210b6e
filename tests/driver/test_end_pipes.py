"""A pipe that closes when a process exits, whatever the process does with its other files."""

from __future__ import annotations

import os
import select
import subprocess
import sys

_PROGRAM = """
import os, sys
from sglrl_workers.process_control import close_on_death
fd = int(sys.argv[1])
close_on_death(fd)
try:
    os.fstat(fd)
except OSError:
    print("closed here", flush=True)
os.closerange(3, 256)
print(open("/dev/null").read() + "the others work", flush=True)
sys.stdin.read()
"""


def test_a_pipe_ends_with_its_process_alone() -> None:
    end, kept = os.pipe()
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, str(kept)], pass_fds=[kept], text=True, **pipes
    ) as process:
        os.close(kept)
        assert process.stdout is not None
        assert process.stdout.readline() == "closed here\n"
        assert process.stdout.readline() == "the others work\n"
        # The process has closed all its files, and the pipe is still open.
        assert select.select([end], [], [], 0) == ([], [], [])
        process.kill()
        assert select.select([end], [], [], 30)[0]
        assert os.read(end, 1) == b""
    os.close(end)
