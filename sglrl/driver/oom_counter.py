"""The kernel's counter of processes that it killed because memory ran out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import msgspec

ROOT = Path("/")
"""The folder with ``proc`` and ``sys``. Tests use another folder."""

_COUNT: Final = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


class OomCounter(msgspec.Struct, frozen=True):
    """The value of a counter of kills.

    owner: "cgroup" for the counter of this process's cgroup, "host" for the counter of the machine.
    kills: the number of processes that the kernel has killed because memory ran out.
    """

    owner: str
    kills: int


def read_oom_counter() -> OomCounter | None:
    """Return the counter that covers this process and its workers, or None if none can be read.

    The counter of the cgroup is preferred, because the counter of the host also counts kills in
    other containers. Sources: https://docs.kernel.org/admin-guide/cgroup-v2.html (memory.events)
    and https://docs.kernel.org/admin-guide/cgroup-v1/memory.html (memory.oom_control).
    """
    for path in _cgroup_files():
        kills = _count(path)
        if kills is not None:
            return OomCounter("cgroup", kills)
    kills = _count(ROOT / "proc/vmstat")
    return None if kills is None else OomCounter("host", kills)


def _cgroup_files() -> list[Path]:
    """Return the files that may have the counter of this process's cgroup, the best first."""
    files = []
    for line in _text(ROOT / "proc/self/cgroup").splitlines():
        _, controllers, cgroup = line.split(":", 2)
        if not controllers:
            folder, name = ROOT / "sys/fs/cgroup", "memory.events"
        elif "memory" in controllers.split(","):
            folder, name = ROOT / "sys/fs/cgroup/memory", "memory.oom_control"
        else:
            continue
        # In a container, the path may be the host's, while the container's cgroup is mounted at
        # the top.
        files += [folder / cgroup.lstrip("/") / name, folder / name]
    return files


def _count(path: Path) -> int | None:
    found = _COUNT.search(_text(path))
    return int(found[1]) if found else None


def _text(path: Path) -> str:
    """Return the content of a file, or "" if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""
