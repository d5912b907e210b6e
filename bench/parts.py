"""Run each measured system, a part, in its own process.

A part starts after the previous part has exited, so that no two systems share a core, a GPU or a
garbage collector. A part is a function or a coroutine function that receives ``note`` and returns
figures. Its other arguments are bound by ``functools.partial``. The part is sent to its process as
a pickle. The process writes JSON lines (``note``, then ``result`` or ``error``) to a pipe. The
output of the process and its children goes to a log, which is shown if the part fails.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import os
import pickle
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
from functools import partial
from pathlib import Path
from typing import IO, Any

import psutil

ROOT = Path(__file__).resolve().parent.parent
_LOG_TAIL = 12
_END_SECONDS = 30.0
_INTERRUPT_SECONDS = 10.0
"""Seconds that a part has to clean up, for example to remove its network namespaces."""

Note = Callable[[str], None]
"""Shows the user what a part is doing."""
Part = Callable[[Note], Any]
"""Measures a system, and returns its figures or an awaitable of them. The figures are JSON
values."""


class PartFailed(Exception):
    """A part could not be measured. The message is the reason. ``log`` has its last output."""

    def __init__(self, reason: str, log: str) -> None:
        super().__init__(reason)
        self.log = log


def run_part(part: Part, note: Note, limit: float, env: Mapping[str, str] | None = None) -> Any:
    """Measure a part in a new process and return its figures as JSON values.

    When this returns, all processes of the part have exited.

    Args:
        part: the part.
        note: receives the notes of the part.
        limit: seconds after which the part is killed.
        env: environment variables in addition to the bench's own.

    Raises:
        PartFailed: the part exited without a result, raised an error, or took too long.
    """
    read_end, write_end = os.pipe()
    with (
        tempfile.TemporaryFile(encoding="utf-8", mode="w+", errors="replace") as log,
        tempfile.TemporaryFile() as pickled,
    ):
        pickle.dump(_by_module(part), pickled)
        pickled.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-m", "bench.parts", str(write_end)],
            cwd=ROOT,
            env={**os.environ, **(env or {})},
            stdin=pickled,
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
            return outcome["result"]
        log.seek(0)
        tail = "\n".join(log.read().splitlines()[-_LOG_TAIL:])
        status = process.returncode
        raise PartFailed(outcome.get("error") or f"ended with status {status}", tail)


def _by_module(part: Part) -> Part:
    """Return the part with a function that another process can import.

    The functions of the running program are in ``__main__``, which is another module in the other
    process.
    """
    if not isinstance(part, partial) or part.func.__module__ != "__main__":
        return part
    spec = sys.modules["__main__"].__spec__
    assert spec is not None, "run the bench with python -m"
    function = getattr(importlib.import_module(spec.name), part.func.__name__)
    return partial(function, *part.args, **part.keywords)


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
    """Wait until the part's processes have exited, which frees the GPU. Kill them if needed.

    Args:
        process: the process of the part.
        patience: seconds to wait before the process is interrupted.
    """
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
    members = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                members.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return members


def _serve(descriptor: int) -> None:
    """Measure the part whose pickle is on standard input, and write its figures to the pipe."""
    # Children must not inherit the pipe, because it would then stay open after this process exits.
    os.set_inheritable(descriptor, False)
    threading.Thread(target=_die_with_the_bench, args=(descriptor,), daemon=True).start()
    pipe = os.fdopen(descriptor, "w", buffering=1, encoding="utf-8")

    def send(**message: Any) -> None:
        pipe.write(json.dumps(message) + "\n")

    try:
        result = pickle.load(sys.stdin.buffer)(lambda text: send(note=text))
        if inspect.iscoroutine(result):
            import uvloop

            result = uvloop.run(result)
        send(result=result)
    except BaseException as error:
        traceback.print_exc()
        send(error=f"{type(error).__name__}: {error}")


def _die_with_the_bench(descriptor: int) -> None:
    """Kill this process group when the bench closes its end of the pipe."""
    poller = select.poll()
    poller.register(descriptor, 0)
    poller.poll()
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
    if "sglang" in sys.modules:
        sys.stderr.flush()
        # SGLang's threads and the teardown of CUDA can take seconds, and there is nothing to save.
        os._exit(0)
