"""Run test programs that need their own process: a process can have only one SGLang scheduler."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import runpy
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import sglrl
from sglrl.actors.actor import constructor_arguments
from sglrl.actors.class_pickling import importable_as
from sglrl.actors.spawning import ActorHandle
from sglrl.config import FabricConfig, PoolConfig
from sglrl.driver.launcher import LaunchSpec, LocalLauncher
from sglrl.driver.pool import Pool
from sglrl.wire.processes import ActorSpec, EngineSpec

if TYPE_CHECKING:
    from sglrl_workers.engine.sglang.scheduler import SglrlScheduler


class Program(sglrl.Actor):
    """Runs one program in a fork of the fork server that has imported SGLang."""

    @sglrl.endpoint
    async def run(self, name: str, arguments: list[str]) -> str:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        sys.argv = [name, *arguments]
        with contextlib.redirect_stdout(io.StringIO()) as output:
            runpy.run_module(name, run_name="__main__", alter_sys=False)
        return output.getvalue()


def run_program(name: str, *arguments: object) -> Any:
    """Run a program of the tests and return the last line that it prints, as JSON.

    Args:
        name: the module, such as "engine.plan_program".
        arguments: the texts of the program's ``sys.argv``.
    """
    with ThreadPoolExecutor(1) as thread:
        # In a thread, because the caller may be a test that runs on an event loop.
        output = thread.submit(asyncio.run, _run(name, [*map(str, arguments)])).result()
    return json.loads(output.splitlines()[-1])


async def _run(name: str, arguments: list[str]) -> str:
    body, _ = constructor_arguments(Program).encode((), {})
    spec = ActorSpec(target=importable_as(Program), code=b"", args=body, frames=[], window=1)
    pool = Pool(
        [LaunchSpec(bodies=[spec], env={})],
        more=lambda n, present: [],
        name=name,
        launcher=LocalLauncher("sglang", None, 300.0),
        fabric=FabricConfig(max_attempts=1),
        config=PoolConfig(start_timeout=300.0, restarts=0),
    )
    async with ActorHandle(Program, pool) as program:
        output: str = await program.run(name, arguments, timeout=300)
        return output


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
