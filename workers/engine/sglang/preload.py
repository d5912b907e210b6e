"""Import SGLang's slow modules in the fork server, so that forked workers have them already."""

from __future__ import annotations

import contextlib
import importlib
import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    # The registry imports all models of SGLang, which takes as long as all other imports.
    import sglang.srt.models.registry as registry  # noqa: F401

    from . import cpu as cpu
    from . import scheduler as scheduler
    from .patch_list import PATCHES
    from .source import sglang_folder

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
"""Modules that SGLang imports only while it starts a scheduler.

Some versions of SGLang do not have all of these modules.
"""


def warm() -> None:
    """Do the work that every worker would otherwise repeat."""
    from sglang.srt.arg_groups import arg_utils
    from sglang.srt.server_args import ServerArgs

    for name in _LATER:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    # SGLang evaluates four hundred annotations one by one, and caches the results.
    for look_up in ("namespace_of", "resolvable_fields"):
        getattr(arg_utils, look_up, lambda cls: None)(ServerArgs)


def load(device: str) -> None:
    """Import the modules of workers on a device, "cpu" or "cuda"."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warm()
        for patch in PATCHES:
            # Cache the digests of SGLang's source, which every worker needs.
            patch.unknown(sglang_folder())
            if patch.module is not None and patch.device in ("", device):
                importlib.import_module(f".{patch.module}", __package__)
