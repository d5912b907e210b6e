"""Let several ranks of an engine run on a CPU. They communicate over gloo."""

from __future__ import annotations

import functools
import os

import sglang.srt.distributed.parallel_state as parallel_state

from ..patch import Setup


def install(setup: Setup) -> None:
    """Patch SGLang's groups of ranks, and let all ranks share the cores of the process."""
    # SGLang makes an NCCL communicator beside gloo in each group, which needs a GPU.
    parallel_state.init_model_parallel_group = functools.partial(
        parallel_state.init_model_parallel_group, use_pynccl=False
    )
    # By default SGLang requires a NUMA node for each rank, for kernels that bind their threads to
    # cores. Its published wheels do not contain these kernels.
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    ranks = setup.server_args.tp_size
    os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "|".join([cores] * ranks))
