"""Programs of tests that have a scheduler to themselves: SGLang's is one of a kind in a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglrl.wire.processes import EngineSpec

if TYPE_CHECKING:
    from sglrl_workers.engine.sglang.scheduler import SglrlScheduler


def run_program(name: str, *arguments: object) -> Any:
    """What a program of this folder says at last, as JSON."""
    program = subprocess.run(
        [sys.executable, "-m", f"{__package__}.{name}", *map(str, arguments)],
        cwd=Path(__file__).parent.parent,
        env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=110,
        check=True,
    )
    return json.loads(program.stdout.splitlines()[-1])


def make_scheduler(model: str, rendezvous: str, **arguments: Any) -> SglrlScheduler:
    """On the CPU, in float32, of nobody's requests. ``arguments``: of SGLang."""
    from sglrl_workers.engine.sglang import compat
    from sglrl_workers.engine.sglang.scheduler import SglrlScheduler, _memory, _server_args

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
    )
    os.environ["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] = f"file://{rendezvous}"
    server_args = _server_args(spec)
    compat.publish_arguments(server_args, 0, 0)
    with _memory(spec):
        return SglrlScheduler(
            None, 0, *compat.scheduler_arguments(server_args, compat.no_ports(), 0, 0)
        )
