"""The modules that every call goes through are compiled with mypyc when the package is installed,
if there is a C compiler (``setup.py``). Here is decided which are imported: those, or their source.

They are used if all of them were made of this very source, and ``SGLRL_COMPILED`` is not 0. So a
source file that was edited is what runs, until the next installation compiles it. Mixed they are
never: what is compiled takes no objects but its own.
"""

from __future__ import annotations

import os
import sys
import zlib
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec, spec_from_file_location
from typing import Any, Final

MODULES: Final = (
    "core.call_queue",
    "core.calls",
    "core.clients",
    "core.fabric",
    "core.members",
    "core.rollouts",
    "core.routing",
    "core.waiting",
    "driver",
    "relay",
    "remote_driver",
    "replies",
    "requests",
    "rollout.state",
)


def _source(name: str) -> str:
    return os.path.join(os.path.dirname(__file__), *name.split(".")) + ".py"


# Not of pathlib, whose import takes longer than all that is done here.
SOURCES: Final = {name: _source(name) for name in MODULES}

why_not = ""
"""Why the source is used; empty if it is not. Set by ``choose``."""


def group_name() -> str:
    """Of the library that holds the code of all of them: by what their sources contain. (Their
    CRC-32, one after another: it tells versions of files apart, and nobody gains by a collision.)
    """
    digest = 0
    for path in SOURCES.values():
        with open(path, "rb") as file:
            digest = zlib.crc32(file.read(), digest)
    return f"sglrl_{digest:08x}"


class _Sources:
    """A finder that comes before Python's own, which prefers what is compiled. For all modules: one
    may be left from when it was compiled, too. (``_ids`` has no other source.)"""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        package, _, inner = name.partition(".")
        source = _source(inner)
        if package != "sglrl" or not os.path.isfile(source):
            return None
        return spec_from_file_location(name, source)


def _reason() -> str:
    if os.environ.get("SGLRL_COMPILED") == "0":
        return "SGLRL_COMPILED is 0"
    for name, source in SOURCES.items():
        found = PathFinder.find_spec(f"sglrl.{name}", [os.path.dirname(source)])
        if found is None or found.origin == source:
            return "not compiled: no C compiler, or no headers of Python, when it was installed"
    if find_spec(f"{group_name()}__mypyc") is None:
        return "the source was edited since; install sglrl again to compile it"
    return ""


def choose() -> None:
    """Before any of them is imported. Raises ``ImportError`` if ``SGLRL_COMPILED`` is 1 and what is
    compiled cannot be used."""
    global why_not
    why_not = _reason()
    if why_not:
        if os.environ.get("SGLRL_COMPILED") == "1":
            raise ImportError(f"SGLRL_COMPILED is 1, but {why_not}")
        sys.meta_path.insert(0, _Sources)
