"""Import SGLang's dependencies in the fork server after ``engine.sglang.preload_cuda`` has failed.

Each worker must then import SGLang's own modules itself, which takes seconds. None of ``MODULES``
initialises CUDA, because a process that has initialised CUDA must not fork.
"""

from __future__ import annotations

import contextlib
import importlib
import warnings

# A test on a GPU showed that none of these initialises CUDA. transformers' processing_auto does.
MODULES = (
    "torch",
    "torch._dynamo",
    "torch.distributed",
    "transformers.generation.utils",
    "transformers.models.auto.modeling_auto",
    "openai",
    "fastapi",
    "aiohttp",
    "IPython",
    "networkx",
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    for _name in MODULES:
        # SGLang versions differ in their dependencies, so a module may be missing.
        with contextlib.suppress(ImportError):
            importlib.import_module(_name)

import torch  # noqa: E402

from .engine.sglang.patch_list import PATCHES  # noqa: E402
from .engine.sglang.source import sglang_folder  # noqa: E402

for _patch in PATCHES:
    # Workers inherit the cached digests of the source. This imports no part of SGLang.
    _patch.unknown(sglang_folder())

if torch.cuda.is_initialized():
    raise RuntimeError(
        "an imported package initialised CUDA; workers cannot be forked from this process"
    )
