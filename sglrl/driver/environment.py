"""What the Python of this process has: ``python -m sglrl.driver.environment`` prints it as JSON."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import msgspec

from ..version import __version__
from ..wire.processes import Environment


def environment() -> Environment:
    """Describe this Python. Imports neither torch nor SGLang."""
    sglang = find_spec("sglang")
    folders = sglang.submodule_search_locations if sglang is not None else None
    return Environment(
        python=f"{sys.version_info.major}.{sys.version_info.minor}",
        sglrl=__version__,
        sglang=folders[0] if folders else "",
    )


if __name__ == "__main__":
    sys.stdout.write(msgspec.json.encode(environment()).decode())
