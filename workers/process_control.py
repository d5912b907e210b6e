"""Process settings of Linux for which Python has no function: signals, priorities, OOM scores."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_M_ARENA_MAX = -8
_CLONE_FILES = 0x400


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Request a signal from the kernel when this process's parent exits."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def outlive_parent() -> None:
    """Undo ``die_with_parent``.

    This is needed because the kernel also sends the signal when the *thread* that started this
    process exits, even if the parent process goes on.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0)


def raise_oom_score(by: int) -> None:
    """Make the kernel more likely to kill this process when memory runs out."""
    path = Path("/proc/self/oom_score_adj")
    with contextlib.suppress(OSError, ValueError):
        path.write_text(
            str(min(1000, int(path.read_text(encoding="utf-8")) + by)), encoding="utf-8"
        )


def set_process_name(name: str) -> None:
    """Set the process name that ``ps`` shows: at most 15 ASCII characters."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode())


def limit_arenas(most: int) -> None:
    """Limit the malloc arenas of this process and its forks. Only glibc has this setting."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, most)


def reset_priority(pid: int) -> None:
    """Give a process and its session normal priority."""
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/autogroup").write_text("0", encoding="utf-8")


def kill_group(pid: int) -> None:
    """Kill a process and the processes of its group."""
    # The process may not have called setsid yet, so kill the process itself as well.
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def close_on_death(fd: int) -> None:
    """Keep ``fd`` open only in an idle thread that has its own file table.

    When this process is killed, the kernel ends the thread at once and closes ``fd``. The process
    at the other end of the pipe thus notices the exit at once. The kernel closes the other files
    only after it has freed the memory, which takes a while.
    """
    kept = threading.Event()

    def wait() -> None:
        # Only SIGKILL may end this thread.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        libc = ctypes.CDLL(None)
        try:
            own = libc.unshare(_CLONE_FILES) == 0
            for other in map(int, os.listdir("/proc/thread-self/fd") if own else ()):
                if other != fd:
                    # The file descriptor of ``listdir`` itself is already closed.
                    with contextlib.suppress(OSError):
                        os.close(other)
        finally:
            # Set the event even after an error, because the caller waits for it.
            kept.set()
        while own:
            libc.pause()

    threading.Thread(target=wait, name="sglrl-end", daemon=True).start()
    kept.wait()
    os.close(fd)
