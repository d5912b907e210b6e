"""SGLang's Engine and HTTP server on a CPU-only machine, prepared like our own worker.

Both start their scheduler in its own process, through a function that can be replaced. The function
here prepares the process first. Everything else is SGLang's own.
"""

from __future__ import annotations

import os
from typing import Any


def run_scheduler_process(*args: Any, **kwargs: Any) -> Any:
    from sglang.srt.managers import scheduler

    from sglrl_workers.engine.sglang import cpu

    cpu.prepare(os.cpu_count() or 1)
    return scheduler.run_scheduler_process(*args, **kwargs)


def arguments(device: str) -> dict[str, Any]:
    """Return the ``ServerArgs`` that a CPU needs, as our worker sets them for one replica."""
    if device != "cpu":
        return {}
    from sglrl_workers.engine.sglang import cpu

    found: dict[str, Any] = cpu.engine_arguments(1.0)
    return found
