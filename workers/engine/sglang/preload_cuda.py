"""Import SGLang in the fork server that forks workers for GPUs.

Importing this module raises an error if SGLang cannot be imported before the fork, for example
because the GPUs differ.
"""

from __future__ import annotations

from .cuda_answers import answers, check_cuda_after_fork, devices

with answers(devices()):
    from .preload import load

    load("cuda")
check_cuda_after_fork()
