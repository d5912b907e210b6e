"""Replacements of some of SGLang's own code behave exactly like the original code."""

from __future__ import annotations

from pathlib import Path

import pytest

from .programs import run_program


@pytest.mark.parametrize("loop", ["normal", "overlap"])
def test_steps_are_as_sglang_makes_them(loop: str, qwen: Path) -> None:
    """Requests of all kinds give the same results, and leave the same prefix cache.

    The cache is so small that prefixes are evicted and requests are retracted. Some requests are
    aborted.
    """
    found = run_program("engine.steps_program", qwen, loop)
    ours, theirs = found["ours"], found["theirs"]
    assert ours["said"] == theirs["said"]
    assert ours == theirs
    assert len([said for said in ours["said"] if said[0] == "aborted"]) >= 3
    # Our code must really have run: the installed SGLang is a supported version.
    assert found["results"] == "Results"
    assert found["tokens"] > 1000
    if found["cache"] == "RadixCache":
        assert ours["retracted"] > 0
