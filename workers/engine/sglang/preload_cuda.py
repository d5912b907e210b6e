"""Import SGLang in the fork server that forks workers for GPUs.

The import raises an error if this is not possible, for example because the GPUs differ.
"""

from __future__ import annotations

from .cuda_answers import answers, check_cuda_after_fork, devices

with answers(devices()):
    from .preload import load

    load("cuda")
check_cuda_after_fork()
