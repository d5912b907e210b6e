"""What the fork server imports before it forks: everything slow, nothing that touches a GPU."""

from __future__ import annotations

import contextlib
import importlib
import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    # The registry imports every model that SGLang knows: as slow as all the rest together.
    import sglang.srt.models.registry as registry  # noqa: F401

    from . import cpu as cpu
    from . import scheduler as scheduler
    from .accelerations import cpu_attention as cpu_attention

_LATER = (
    "sglang.srt.arg_groups.kimi_k3_hook",
    "sglang.srt.arg_groups.pd_disaggregation_hook",
    "sglang.srt.arg_groups.speculative_hook",
    "sglang.srt.constrained.xgrammar_backend",
    "sglang.srt.distributed.device_communicators.custom_all_reduce",
    "sglang.srt.distributed.device_communicators.pymscclpp",
    "sglang.srt.distributed.device_communicators.pynccl",
    "sglang.srt.distributed.device_communicators.shm_broadcast",
    "sglang.srt.distributed.device_communicators.torch_symm_mem",
    "sglang.srt.dllm.algorithm",
    "sglang.srt.managers.tp_worker",
)
"""What SGLang imports while it starts a scheduler. A version that has no such module imports
another one then."""


def warm() -> None:
    """Do here what every worker would do again."""
    from sglang.srt.arg_groups import arg_utils
    from sglang.srt.server_args import ServerArgs

    for name in _LATER:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    # Four hundred annotations, evaluated one by one; SGLang keeps what it finds.
    for look_up in ("namespace_of", "resolvable_fields"):
        getattr(arg_utils, look_up, lambda cls: None)(ServerArgs)


with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    warm()
