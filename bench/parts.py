"""Parts: each measured system runs in its own process, started after the previous one has exited.

So no two systems share a core, a GPU or a garbage collector. A system that fails becomes a row with
the reason. A part's process writes JSON lines (``note``, then ``result`` or ``error``) to a pipe.
Output of the process and its children goes to a log, which is shown if the part fails.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import psutil

ROOT = Path(__file__).resolve().parent.parent
_LOG_TAIL = 12
_END_SECONDS = 30.0
_INTERRUPT_SECONDS = 10.0
"""Seconds for a part to clean up, for example to remove its network namespaces."""

Note = Callable[[str], None]
"""Show the user what a part is doing."""
Part = Callable[[Mapping[str, Any], Note], dict[str, Any]]


class PartFailed(Exception):
    """A part could not be measured. The message is the reason, ``log`` is its last output."""

    def __init__(self, reason: str, log: str) -> None:
        super().__init__(reason)
        self.log = log


def run_part(
    module: str,
    name: str,
    options: Mapping[str, Any],
    note: Note,
    limit: float,
    env: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Measure part ``name`` of ``module`` in a new process and return its result.

    All processes of the part have exited on return.

    Args:
        limit: seconds after which the part is killed.
        env: environment variables in addition to the bench's own.

    Raises:
        PartFailed: the part exited without a result, raised, or took too long.
    """
    read_end, write_end = os.pipe()
    with tempfile.TemporaryFile(encoding="utf-8", mode="w+", errors="replace") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", module, name, json.dumps(options), str(write_end)],
            cwd=ROOT,
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=(write_end,),
            start_new_session=True,
        )
        os.close(write_end)
        patience = 0.0
        with os.fdopen(read_end, "rb", buffering=0) as pipe:
            try:
                outcome = _listen(pipe, note, limit)
            except TimeoutError as error:
                outcome = {"error": str(error)}
            else:
                patience = _END_SECONDS
            finally:
                _end(process, patience)
        if "result" in outcome:
            result: dict[str, Any] = outcome["result"]
            return result
        log.seek(0)
        tail = "\n".join(log.read().splitlines()[-_LOG_TAIL:])
        status = process.returncode
        raise PartFailed(outcome.get("error") or f"ended with status {status}", tail)


def _listen(pipe: IO[bytes], note: Note, limit: float) -> dict[str, Any]:
    """Return the part's result: {"result": ...}, {"error": ...}, or {} if it exited without one."""
    deadline = time.monotonic() + limit
    pending = b""
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"took longer than {limit:.0f} s")
            if not selector.select(left):
                continue
            data = pipe.read(1 << 16)
            if not data:
                return {}
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                message: dict[str, Any] = json.loads(line)
                if "note" not in message:
                    return message
                note(message["note"])


def _end(process: subprocess.Popen[bytes], patience: float) -> None:
    """Wait until the part's processes have exited, and kill them if needed: it frees the GPU."""
    family = _group(process.pid)
    try:
        process.wait(timeout=patience)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_INTERRUPT_SECONDS)
    family += _group(process.pid)
    for member in family:
        try:
            if os.getpgid(member.pid) == process.pid:
                member.kill()
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    process.wait()
    psutil.wait_procs(family, timeout=_END_SECONDS)


def _group(leader: int) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


def serve_part(parts: Mapping[str, Part]) -> None:
    """Measure the part that the command line names. This is the main function of such a module."""
    name, options, descriptor = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
    # Children must not hold the pipe, or the bench would not notice that this process exits.
    os.set_inheritable(descriptor, False)
    threading.Thread(target=_die_with_the_bench, args=(descriptor,), daemon=True).start()
    pipe = os.fdopen(descriptor, "w", buffering=1, encoding="utf-8")

    def say(**message: Any) -> None:
        pipe.write(json.dumps(message) + "\n")

    try:
        result = parts[name](options, lambda text: say(note=text))
    except BaseException as error:
        traceback.print_exc()
        say(error=f"{type(error).__name__}: {error}")
    else:
        say(result=result)


def _die_with_the_bench(descriptor: int) -> None:
    """Kill this process group when the bench closes its end of the pipe."""
    poller = select.poll()
    poller.register(descriptor, 0)
    poller.poll()
    os.killpg(0, signal.SIGKILL)
