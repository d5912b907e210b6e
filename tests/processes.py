"""List the processes below another process, and wait until processes exit."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from multiprocessing import resource_tracker
from pathlib import Path


def descendants(pid: int | None = None) -> dict[int, str]:
    """Return the command names of all processes below ``pid``, by default this process.

    Zombies are not included. Nor is the resource tracker of multiprocessing, which TorchRL starts
    here: it exits with this process.
    """
    below: dict[int, list[tuple[int, str]]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            head, _, tail = entry.read_text().rpartition(")")
            number, _, name = head.partition(" (")
            state, parent = tail.split()[:2]
            if state != "Z":
                below.setdefault(int(parent), []).append((int(number), name))
    tracker = getattr(resource_tracker._resource_tracker, "_pid", None)
    found: dict[int, str] = {}
    todo = [os.getpid() if pid is None else pid]
    while todo:
        for child, name in below.get(todo.pop(), ()):
            if child != tracker:
                found[child] = name
                todo.append(child)
    return found


def wait_for_end(pids: list[int], seconds: float) -> list[int]:
    """Wait for processes, which need not be our children. Return those that have not exited."""
    left = dict.fromkeys(pids)
    with contextlib.ExitStack() as stack:
        poll = select.poll()
        by_fd = {}
        for pid in pids:
            try:
                fd = os.pidfd_open(pid)
            except ProcessLookupError:
                del left[pid]
                continue
            stack.callback(os.close, fd)
            poll.register(fd, select.POLLIN)
            by_fd[fd] = pid
        while by_fd:
            ended = poll.poll(seconds * 1000)
            if not ended:
                break
            for fd, _ in ended:
                poll.unregister(fd)
                del left[by_fd.pop(fd)]
    return list(left)


def strike(pid: int, fault: int, seconds: float = 300.0) -> None:
    """Send SIGKILL or SIGSTOP, and return when every thread has received it.

    ``os.kill`` returns earlier. A thread on another core may then still answer a later message.
    """
    os.kill(pid, fault)
    if fault == signal.SIGKILL:
        assert wait_for_end([pid], seconds) == []
        return
    assert fault == signal.SIGSTOP
    until = time.monotonic() + seconds
    # The system notifies only the parent of a stop, so poll.
    while any(state != "T" for state in _thread_states(pid)):
        assert time.monotonic() < until
        os.sched_yield()


def _thread_states(pid: int) -> list[str]:
    found = []
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):
            found.append(stat.read_text().rpartition(")")[2].split()[0])
    return found
