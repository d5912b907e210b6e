"""Return the versions of this Python and its packages. As a program, print them as JSON."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import msgspec

from ..config import __version__
from ..wire.processes import Environment

_NCCL = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
"""The packages that contain NCCL for the wheels of torch."""


def environment() -> Environment:
    """Describe this Python without importing torch or SGLang."""
    sglang = find_spec("sglang")
    folders = sglang.submodule_search_locations if sglang is not None else None
    return Environment(
        python=f"{sys.version_info.major}.{sys.version_info.minor}",
        sglrl=__version__,
        sglang=folders[0] if folders else "",
        torch=_version("torch"),
        nccl=_version(*_NCCL),
    )


def limits(other: Environment, *, gpus: bool) -> list[str]:
    """Describe each version that differs from this Python's, and what therefore does not work.

    The version of sglrl is not compared, because different versions cannot be used together at all.

    Args:
        other: the environment of the other Python.
        gpus: whether the other side has GPUs.
    """
    own = environment()
    differences = []
    if other.python != own.python:
        differences.append(
            f"Python {other.python}, here {own.python}: classes that are not in an installed "
            "package cannot be sent"
        )
    packages = {"torch": (other.torch, own.torch)}
    if gpus:
        packages["NCCL"] = (other.nccl, own.nccl)
    for name, (theirs, ours) in packages.items():
        # A missing package is not reported: a program without torch sends no weights from memory.
        if theirs and ours and theirs != ours:
            differences.append(f"{name} {theirs}, here {ours}: weights cannot be sent from memory")
    return differences


def _version(*packages: str) -> str:
    """Return the version of the first of these packages that is installed, or an empty string."""
    for package in packages:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return ""


if __name__ == "__main__":
    sys.stdout.write(msgspec.json.encode(environment()).decode())
