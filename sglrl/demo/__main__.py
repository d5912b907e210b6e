"""``python -m sglrl.demo``: the same as ``sglrl demo``."""

from __future__ import annotations

import sys

from ..__main__ import main

if __name__ == "__main__":
    main(["demo", *sys.argv[1:]], name="python -m sglrl.demo")
