"""The pages that follow an operation state how many files and functions it enters."""

from __future__ import annotations

import re
from pathlib import Path

from .followed_calls import follow

DOCS = Path(__file__).parents[2] / "docs"


async def test_the_pages_state_the_counts() -> None:
    for page, entered in (await follow()).items():
        text = " ".join((DOCS / page).read_text().split())
        stated = re.search(r"enters (\d+) files and (\d+) functions", text)
        assert stated is not None, page
        files, functions = map(int, stated.groups())
        assert files == entered.files, page
        # Another order of timers and messages enters a few functions more or less.
        assert abs(functions - entered.functions) <= 0.03 * functions + 1, page
