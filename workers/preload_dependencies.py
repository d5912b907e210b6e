"""Import SGLang's dependencies in the fork server, if ``engine.sglang.preload_cuda`` has failed.

Each worker then imports SGLang's own modules, which takes seconds. None of the modules here
initialises CUDA. A process that has initialised CUDA must not fork.
"""

from __future__ import annotations

import contextlib
import importlib
import warnings

# Each of these was checked on a GPU: none initialises CUDA. transformers' processing_auto does.
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
        # A module that this SGLang version does not use may be missing.
        with contextlib.suppress(ImportError):
            importlib.import_module(_name)

import torch  # noqa: E402

from .engine.sglang.patch_list import PATCHES  # noqa: E402
from .engine.sglang.source import sglang_folder  # noqa: E402

for _patch in PATCHES:
    # Every worker compares SGLang's source. This reads files and imports no part of SGLang.
    _patch.unknown(sglang_folder())

if torch.cuda.is_initialized():
    raise RuntimeError(
        "an imported package initialised CUDA; workers cannot be forked from this process"
    )
