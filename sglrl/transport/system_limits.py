"""Raise or check limits of the system: open files, room for files, processes and threads.

Each error for an exhausted limit names the limit and what to do.
"""

from __future__ import annotations

import errno
import os
import resource
import sys
import threading
import time
from pathlib import Path
from typing import Final

from ..errors import WorkerStartError

_MAX_FILES: Final = 1 << 16


def open_standard_files() -> None:
    """Open /dev/null for each of the file descriptors 0, 1 and 2 that is closed.

    libuv aborts the program if it gets one of these descriptors for a file of its own.
    """
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            # ``open`` returns the lowest free descriptor, which is this one.
            os.open(os.devnull, os.O_RDWR)


def raise_file_limit() -> None:
    """Raise the limit of open files and connections to the hard limit, but at most to 65,536."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def no_file(folder: str | Path, error: OSError) -> WorkerStartError:
    """Return the error for a temporary file that cannot be created in ``folder``."""
    return WorkerStartError(
        f"no file can be made in {folder} ({error.strerror or error}); free space and inodes "
        "there (df, df -i), or set TMPDIR to another folder"
    )


def available_memory() -> int:
    """Return the bytes of free memory on this machine, or in this container.

    Caches that the kernel can empty count as free.
    """
    meminfo = Path("/proc/meminfo").read_text(encoding="utf-8")
    (line,) = [text for text in meminfo.splitlines() if text.startswith("MemAvailable")]
    available = int(line.split()[1]) * 1024
    # These files have a container's limit: https://docs.kernel.org/admin-guide/cgroup-v2.html.
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text(encoding="utf-8"))
        used = int((group / "memory.current").read_text(encoding="utf-8"))
        stat = dict(
            text.split()
            for text in (group / "memory.stat").read_text(encoding="utf-8").splitlines()
        )
    except (OSError, ValueError):
        # The container has no limit, or there is no container.
        return available
    return min(available, limit - used + int(stat.get("inactive_file", 0)))


def no_process() -> str:
    """Return the reason why no process or thread can be started, and what to do."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    limit = "unlimited" if soft == resource.RLIM_INFINITY else str(soft)
    return (
        f"the limit of processes and threads is reached (ulimit -u is {limit}; pids.max of a "
        "container may be lower); raise it, end other processes of this user, or start fewer "
        "workers"
    )


def reason(error: OSError) -> str:
    """Return the reason why a process could not be started, from the error."""
    text = error.strerror or str(error)
    return f"{text}: {no_process()}" if error.errno == errno.EAGAIN else text


def start_thread(thread: threading.Thread) -> None:
    """Start a thread. Raise ``WorkerStartError`` if the system has no more threads."""
    try:
        thread.start()
    except RuntimeError as error:
        raise WorkerStartError(f"{error}: {no_process()}") from None


def check_threads(count: int) -> None:
    """Raise ``WorkerStartError`` unless ``count`` more threads can be started.

    Check this before a library starts threads, because the library may otherwise abort the process.
    """
    end = threading.Event()
    started: list[threading.Thread] = []
    try:
        for _ in range(count):
            thread = threading.Thread(target=end.wait, name="sglrl-check", daemon=True)
            start_thread(thread)
            started.append(thread)
    finally:
        end.set()
        until = time.monotonic() + 1.0
        for thread in started:
            thread.join()
            # A thread counts towards the limit until the kernel removes it, shortly after its end.
            while (
                os.path.exists(f"/proc/self/task/{thread.native_id}") and time.monotonic() < until
            ):
                os.sched_yield()


def explain(error: BaseException) -> None:
    """Write the reason to stderr if a worker exits because it could not start a thread."""
    if isinstance(error, RuntimeError) and "start new thread" in str(error):
        sys.stderr.write(f"{no_process()}\n")
