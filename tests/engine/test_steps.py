"""What stands in for some of SGLang's own code does what that does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("steps_program.py")


@pytest.mark.parametrize("loop", ["normal", "overlap"])
def test_steps_are_as_sglang_makes_them(loop: str, qwen: Path) -> None:
    """Requests of all kinds, in a cache so small that prefixes are evicted and requests retracted,
    some of them aborted: the same in every answer, and in what the prefix cache holds then."""
    program = subprocess.run(
        [sys.executable, str(PROGRAM), str(qwen), loop],
        env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=110,
        check=True,
    )
    found = json.loads(program.stdout.splitlines()[-1])
    ours, theirs = found["ours"], found["theirs"]
    assert ours["said"] == theirs["said"]
    assert ours == theirs
    assert len([said for said in ours["said"] if said[0] == "aborted"]) >= 3
    # And it was tried: this SGLang is a known one.
    assert found["results"] == "Results"
    assert found["tokens"] > 1000
    assert (found["cache"], found["leaves"] > 50) in [
        ("Prefixes", True),
        ("UnifiedRadixCache", False),
    ]
    if found["cache"] == "Prefixes":
        assert ours["retracted"] > 0
