"""Print all patches and whether they fit the installed SGLang, as JSON, for ``sglrl doctor``.

Run ``python -m sglrl_workers.engine.sglang.patch_table``. The module reads SGLang's source and
imports no part of SGLang.
"""

from __future__ import annotations

import sys

import msgspec

from .patch_list import PATCHES
from .source import sglang_folder


def rows() -> list[dict[str, str]]:
    """Return for each patch its name, kind, device, purpose, and why its source is unknown."""
    folder = sglang_folder()
    return [
        {
            "name": patch.name,
            "kind": "acceleration" if patch.acceleration else "correction",
            "device": patch.device,
            "unknown": patch.unknown(folder),
            "why": patch.why,
        }
        for patch in PATCHES
    ]


if __name__ == "__main__":
    sys.stdout.write(msgspec.json.encode(rows()).decode() + "\n")
