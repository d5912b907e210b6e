"""Run SGLang's Engine and HTTP server on a machine without a GPU.

Both start their scheduler in its own process, through a function that can be replaced.
``run_scheduler_process`` replaces it, and first prepares the process like our own worker.
Everything else is SGLang's own code.
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
    """Install the patches that SGLang's wheels need to run a model on a CPU.

    Args:
        *accelerations: the names of accelerations to install in addition.
    """
    import torch

    from sglrl_workers.engine.sglang.patch import Setup, install
    from sglrl_workers.engine.sglang.patch_list import PATCHES
    from sglrl_workers.engine.sglang.source import sglang_folder

    torch.set_num_threads(os.cpu_count() or 1)
    wanted = [patch for patch in PATCHES if patch.name in ("cpu_kernels", *accelerations)]
    server_args = SimpleNamespace(enable_deterministic_inference=False, rl_on_policy_target=None)
    install(wanted, Setup(server_args=server_args, device="cpu"), sglang_folder())


def cpu_arguments() -> dict[str, Any]:
    """Return the ``ServerArgs`` that a CPU needs. The only worker on a host has the same."""
    from sglrl_workers.engine.sglang import cpu

    arguments: dict[str, Any] = cpu.engine_arguments(1.0)
    return arguments
