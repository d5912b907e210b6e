"""What the fork server imports before it forks workers that will use a GPU.

Importing SGLang on a machine with a GPU initialises CUDA (it asks for the compute capability at
import), and a process that has done so must not fork. So only what SGLang itself imports is warmed
here, which is most of the time; SGLang's own modules are imported in each worker.
"""

from __future__ import annotations

import contextlib
import importlib
import warnings

# Checked one by one on a GPU: none of these initialises CUDA. transformers' processing_auto does.
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
        # Whichever of them this SGLang version does without need not be installed.
        with contextlib.suppress(ImportError):
            importlib.import_module(_name)

import torch  # noqa: E402

if torch.cuda.is_initialized():
    raise RuntimeError(
        "an imported package initialised CUDA; workers cannot be forked from this process"
    )
