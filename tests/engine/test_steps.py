"""What stands in for some of SGLang's own code does what that does."""

from __future__ import annotations

from pathlib import Path

import pytest

from .programs import run_program


@pytest.mark.parametrize("loop", ["normal", "overlap"])
def test_steps_are_as_sglang_makes_them(loop: str, qwen: Path) -> None:
    """Requests of all kinds, in a cache so small that prefixes are evicted and requests retracted,
    some of them aborted: the same in every answer, and in what the prefix cache holds then."""
    found = run_program("steps_program", qwen, loop)
    ours, theirs = found["ours"], found["theirs"]
    assert ours["said"] == theirs["said"]
    assert ours == theirs
    assert len([said for said in ours["said"] if said[0] == "aborted"]) >= 3
    # And it was tried: this SGLang is a known one.
    assert found["results"] == "Results"
    assert found["tokens"] > 1000
    if found["cache"] == "RadixCache":
        assert ours["retracted"] > 0
