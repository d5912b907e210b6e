"""The life of a worker process from the fork to the exit: it waits, sets itself up, and serves."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
from functools import partial

import msgspec

from sglrl.wire.processes import ActorSpec, EngineSpec, Fork, WorkerSpec

from .process_control import close_on_death, die_with_parent, raise_oom_score, set_process_name

_OOM_SCORE = 300
"""The difference between the ``oom_score_adj`` of a worker and of the fork server."""


def detach(parent: int) -> None:
    """Make a process that was just forked independent of its parent's session and signals.

    The process still dies with its parent.
    """
    die_with_parent(parent)
    raise_oom_score(_OOM_SCORE)
    set_process_name("sglrl spare")
    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)


def become_worker(pipe: int, kept: int) -> None:
    """Wait for a ``Fork`` on ``pipe`` and run the worker that it requests.

    Return if ``pipe`` closes without a message. When the worker is killed, ``kept`` closes.
    """
    with open(pipe, "rb") as file:
        body = file.read()
    if not body:
        return
    set_process_name("sglrl worker")
    request = msgspec.msgpack.decode(body, type=Fork)
    log = os.open(request.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    close_on_death(kept)
    # faulthandler is written in C, so it also works while no Python code can run.
    # After a crash (SIGSEGV, for example), the log has the Python stacks.
    faulthandler.enable(file=2, all_threads=True)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True, chain=False)
    os.environ.update(request.env)
    with contextlib.suppress(OSError):
        # The folder may no longer exist.
        os.chdir(request.cwd)
    if request.sys_path is not None:
        sys.path[:] = request.sys_path
    sys.argv[:] = ["sglrl-worker"]
    _run(request.spec)


def _run(spec: WorkerSpec) -> None:
    """Run the worker until ``Shutdown``.

    An exception ends the process. Its traceback is the worker's last output, which the driver
    shows.
    """
    match spec.body:
        case ActorSpec():
            from .actor_worker import run_actor

            run_actor(spec, spec.body)
        case EngineSpec(engine="sglang"):
            from .engine.sglang.run import run_scheduler

            run_scheduler(spec, spec.body)
        case EngineSpec(engine="fake"):
            from .engine.fake import FakeEngine
            from .engine.loop import run_engine
            from .weights.late_channel import LateRankWeights

            engine = FakeEngine(spec.body)
            channel = LateRankWeights(spec, partial(engine.make_weights, spec))
            run_engine(spec, spec.body, engine)
            channel.close()
        case EngineSpec(engine=other):
            raise ValueError(f"unknown engine {other!r}")
