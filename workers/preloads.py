"""The modules that a fork server imports, so that the workers that it forks start quickly."""

from __future__ import annotations

import gc
import importlib
import os
import time
import traceback

from sglrl.wire.processes import Warm

from .process_control import limit_arenas

_PRELOADS = {
    "plain": ("sglrl_workers.actor_worker",),
    "tokenizer": ("sglrl_workers.actor_worker", "transformers.models.auto.tokenization_auto"),
    "sglang": ("sglrl_workers.actor_worker", "sglrl_workers.engine.sglang.preload_cpu"),
    "sglang-cuda": ("sglrl_workers.actor_worker", "sglrl_workers.engine.sglang.preload_cuda"),
    "sglang-late": ("sglrl_workers.actor_worker", "sglrl_workers.preload_dependencies"),
}
INSTEAD = {"sglang-cuda": "sglang-late"}
"""By kind of worker: the kind to preload instead if importing its modules has failed."""


def preload(name: str) -> Warm:
    """Import the modules of one kind of worker. Return the duration, and the error if any."""
    begun = time.monotonic()
    error = ""
    if name == "sglang":
        _set_up_cpu()
    elif name == "tokenizer":
        # With this setting, torch looks for GPUs through NVML. Without it, torch initialises CUDA,
        # and the process must not fork.
        os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    # Importing leaves little cyclic garbage. The collector would take a quarter of the time.
    gc.disable()
    try:
        for module in _PRELOADS[name]:
            importlib.import_module(module)
    except BaseException:
        error = traceback.format_exc()
    # Imported modules stay in memory. In a forked process, the garbage collector must not write to
    # the pages of these modules, because each write copies a page.
    gc.collect()
    gc.freeze()
    gc.enable()
    return Warm(time.monotonic() - begun, error)


def _set_up_cpu() -> None:
    """Prepare the environment of SGLang workers on a CPU, before torch and SGLang are imported."""
    # Workers on a CPU share its cores with each other and the driver. OpenMP threads that spin
    # while they wait would take cores from busy processes. torch reads this variable when it loads.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # SGLang compiles a few small functions with a C++ compiler when it first uses them. The first
    # repetition penalty would block a worker for eight seconds.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    # Without this limit, each thread of a weight update has a malloc arena of its own, and the
    # arena keeps memory that is no longer needed.
    limit_arenas(1)
    # SGLang initialises CUDA at import if it detects a GPU, and a process with CUDA must not fork.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
