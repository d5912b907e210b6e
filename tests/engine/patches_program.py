"""Find everything in SGLang that our code replaces, wraps or overrides, and print it as JSON.

Run it in the folder of tests: ``python -m engine.patches_program MODEL [lora]``.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components.request_receiver import SchedulerRequestReceiver

from sglrl_workers.engine.sglang.scheduler import SglrlScheduler, _Receiver

from .programs import make_scheduler


def is_ours(value: Any) -> bool:
    value = getattr(value, "__func__", value)
    kind = value if hasattr(value, "__module__") else type(value)
    # ``functools.wraps`` copies the name of the module, but not the code.
    file = value.__code__.co_filename if isinstance(value, FunctionType) else ""
    return str(kind.__module__).startswith("sglrl_workers") or "workers/engine/sglang/" in file


def replaced() -> Iterator[str]:
    """Yield functions and methods of ours in the modules and classes of SGLang."""
    for module in [m for name, m in sys.modules.items() if name.startswith("sglang.")]:
        for name, value in list(vars(module).items()):
            if isinstance(value, ModuleType):
                continue
            if is_ours(value):
                yield f"{module.__name__}:{name}"
            elif isinstance(value, type) and value.__module__ == module.__name__:
                for attribute, member in list(vars(value).items()):
                    if is_ours(member):
                        yield f"{module.__name__}:{name}.{attribute}"


def overridden(ours: type, theirs: type) -> Iterator[str]:
    """Yield the methods of ``theirs`` that our subclass overrides."""
    for name in vars(ours):
        if name in vars(theirs) and callable(getattr(theirs, name)) and not name.startswith("__"):
            yield f"{theirs.__module__}:{theirs.__name__}.{name}"


def wrapped(instance: Any, theirs: type) -> Iterator[str]:
    """Yield the methods of ``theirs`` that are replaced in one instance."""
    for name, value in vars(instance).items():
        if name in vars(theirs) and is_ours(value):
            yield f"{theirs.__module__}:{theirs.__name__}.{name}"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        arguments: dict[str, Any] = {}
        if sys.argv[2:] == ["lora"]:
            arguments = {
                "enable_lora": True,
                "max_lora_rank": 8,
                "lora_target_modules": ["q_proj"],
            }
        scheduler: Any = make_scheduler(sys.argv[1], f"{folder}/rendezvous", **arguments)
        runner = scheduler.tp_worker.model_runner
        results = type(scheduler.batch_result_processor)
        found = {
            *replaced(),
            *overridden(SglrlScheduler, Scheduler),
            *overridden(_Receiver, SchedulerRequestReceiver),
            *overridden(results, results.__bases__[0]),
            *wrapped(scheduler, Scheduler),
            *wrapped(runner, type(runner)),
        }
    print(json.dumps(sorted(found)))


if __name__ == "__main__":
    main()
