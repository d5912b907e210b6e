"""Run test programs that need their own process: a process can have only one SGLang scheduler."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from multiprocessing import forkserver
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglrl.wire.processes import EngineSpec

if TYPE_CHECKING:
    from sglrl_workers.engine.sglang.scheduler import SglrlScheduler


_PRELOADED = "sglrl_workers.engine.sglang.scheduler"


def run_program(name: str, *arguments: object, fresh: bool = False) -> Any:
    """Run a program of this folder and return the last line that it prints, as JSON.

    Args:
        fresh: start a new interpreter. By default the program is forked from a process that has
            already imported SGLang, because the import takes 20 seconds.
    """
    module = f"{__package__}.{name}"
    words = [*map(str, arguments)]
    if fresh:
        program = subprocess.run(
            [sys.executable, "-m", module, *words],
            cwd=Path(__file__).parent.parent,
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
            stdout=subprocess.PIPE,
            text=True,
            timeout=110,
            check=True,
        )
        return json.loads(program.stdout.splitlines()[-1])
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([_PRELOADED])
    with tempfile.NamedTemporaryFile("r") as output:
        process = context.Process(target=_run, args=(module, words, output.name))
        process.start()
        process.join(110)
        if process.exitcode is None:
            process.kill()
        assert process.exitcode == 0, f"{module} ended with {process.exitcode}"
        return json.loads(output.read().splitlines()[-1])


def stop_programs() -> None:
    """Stop the process from which programs are forked."""
    forkserver._forkserver._stop()  # type: ignore[attr-defined]


def _run(module: str, arguments: list[str], output: str) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    sys.argv = [module, *arguments]
    with open(output, "w") as file, contextlib.redirect_stdout(file):
        runpy.run_module(module, run_name="__main__", alter_sys=False)


def make_scheduler(
    model: str, rendezvous: str, accelerations: tuple[str, ...] | None = None, **arguments: Any
) -> SglrlScheduler:
    """Make an idle scheduler on the CPU, in float32. ``arguments`` are SGLang's."""
    from sglrl_workers.engine.sglang.run import build

    spec = EngineSpec(
        engine="sglang",
        model=model,
        args={"dtype": "float32", **arguments},
        device="cpu",
        rank=0,
        tp_size=1,
        gpu_id=0,
        rendezvous=rendezvous,
        threads=1,
        memory_share=0.5,
        window=64,
        accelerations=accelerations,
    )
    return build(spec, None)
