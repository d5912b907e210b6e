"""SGLang's Engine and HTTP server on a CPU-only machine, prepared like our own worker.

Both start their scheduler in its own process, through a function that can be replaced. The function
here prepares the process first. Everything else is SGLang's own.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any


def run_scheduler_process(*args: Any, **kwargs: Any) -> Any:
    from sglang.srt.managers import scheduler

    prepare()
    return scheduler.run_scheduler_process(*args, **kwargs)


def prepare(*accelerations: str) -> None:
    """Install the patches without which SGLang's wheels run no model on a CPU."""
    import torch

    from sglrl_workers.engine.sglang.patch import Setup, install
    from sglrl_workers.engine.sglang.patch_list import PATCHES
    from sglrl_workers.engine.sglang.source import sglang_folder

    torch.set_num_threads(os.cpu_count() or 1)
    wanted = [patch for patch in PATCHES if patch.name in ("cpu_kernels", *accelerations)]
    server_args = SimpleNamespace(enable_deterministic_inference=False, rl_on_policy_target=None)
    install(wanted, Setup(server_args=server_args, device="cpu"), sglang_folder())


def cpu_arguments() -> dict[str, Any]:
    """Return the ``ServerArgs`` that a CPU needs, as our worker sets them for one replica."""
    from sglrl_workers.engine.sglang import cpu

    arguments: dict[str, Any] = cpu.engine_arguments(1.0)
    return arguments
