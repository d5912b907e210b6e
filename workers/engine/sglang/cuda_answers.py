"""Answer questions about GPUs in a process that must not initialise CUDA.

A process that has initialised CUDA must not fork. But SGLang and its dependencies query the
properties of the GPU at import, which initialises CUDA. Therefore a child process queries CUDA, and
torch returns the child's answers in the fork server while SGLang is imported.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import wraps
from types import SimpleNamespace
from typing import Any, Final

import msgspec
import torch

from ...process_control import die_with_parent

_SECONDS: Final = 60
"""Maximum number of seconds that CUDA may take to start."""


class Device(msgspec.Struct, frozen=True):
    """The properties of one GPU.

    Attributes:
        capability: the compute capability.
        properties: the integers and strings in ``torch.cuda.get_device_properties``.
    """

    name: str
    capability: tuple[int, int]
    properties: dict[str, int | str]

    @property
    def model(self) -> tuple[Any, ...]:
        """The values that all GPUs of the same model share."""
        return self.name, self.capability, self.properties["multi_processor_count"]


def devices() -> list[Device]:
    """Return the visible GPUs, which a child process queries.

    Raises:
        RuntimeError: CUDA does not work.
    """
    return msgspec.json.decode(_in_child(_ask), type=list[Device])


def _ask() -> bytes:
    return msgspec.json.encode([_device(i) for i in range(torch.cuda.device_count())])


def _device(index: int) -> Device:
    given = torch.cuda.get_device_properties(index)
    properties = {
        name: value
        for name in dir(given)
        if not name.startswith("_") and isinstance(value := getattr(given, name), (int, str))
    }
    return Device(given.name, torch.cuda.get_device_capability(index), properties)


def check_cuda_after_fork() -> None:
    """Raise ``RuntimeError`` if CUDA does not work in forks of this process."""
    _in_child(lambda: bytes(torch.cuda.init() or 0))


def _in_child(function: Callable[[], bytes]) -> bytes:
    """Return the result of ``function`` in a fork of this process. Kill the fork if it is late."""
    parent = os.getpid()
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            # Remove the signal handlers that the fork inherits from the parent.
            for number in (signal.SIGTERM, signal.SIGALRM):
                signal.signal(number, signal.SIG_DFL)
            die_with_parent(parent)
            signal.alarm(_SECONDS)
            with open(writing, "wb") as file:
                file.write(function())
            status = 0
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(status)
    os.close(writing)
    with open(reading, "rb") as file:
        answer = file.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status == -signal.SIGALRM:
        raise RuntimeError(f"CUDA did not start within {_SECONDS} s in a fork of this process")
    if status != 0:
        raise RuntimeError("CUDA does not work in a fork of this process")
    return answer


@contextlib.contextmanager
def answers(known: list[Device]) -> Iterator[None]:
    """Let torch answer questions about GPUs from ``known`` within the block.

    Modules may keep references to the replacing functions, which query CUDA after the block.

    Raises:
        RuntimeError: the GPUs differ or there is none, so the answers may be wrong for a worker. Or
            the block has tried to initialise CUDA, even if it has caught that error.
    """
    if len({device.model for device in known}) != 1:
        raise RuntimeError(f"the GPUs differ, or there is none: {[d.name for d in known]}")
    first = known[0]
    tried: list[str] = []
    inside = True

    def refuse() -> None:
        tried.append("CUDA was initialised during the import")
        raise RuntimeError(tried[0])

    cuda, accelerator = torch.cuda, torch.device("cuda")
    replaced: list[tuple[Any, str, Callable[..., Any]]] = [
        (cuda, "is_available", lambda: True),
        (cuda, "device_count", lambda: len(known)),
        (cuda, "current_device", lambda: 0),
        (cuda, "get_device_capability", lambda device=None: first.capability),
        (cuda, "get_device_name", lambda device=None: first.name),
        (cuda, "get_device_properties", lambda device=None: SimpleNamespace(**first.properties)),
        (cuda, "_lazy_init", refuse),
        # torch.get_device_module and torch.accelerator call these functions.
        (torch._C, "_get_accelerator", lambda check=None: accelerator),
        (torch._C, "_accelerator_getAccelerator", lambda: accelerator),
    ]

    def answering(original: Callable[..., Any], answer: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def answered(*args: Any, **kwargs: Any) -> Any:
            return (answer if inside else original)(*args, **kwargs)

        return answered

    originals = [getattr(module, name) for module, name, _ in replaced]
    for (module, name, answer), original in zip(replaced, originals, strict=True):
        setattr(module, name, answering(original, answer))
    try:
        yield
    finally:
        inside = False
        for (module, name, _), original in zip(replaced, originals, strict=True):
            setattr(module, name, original)
    if tried:
        raise RuntimeError(tried[0])
