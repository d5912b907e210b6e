"""The examples, as a user runs them, for a few steps."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
LINES = {
    "grpo": r"step \d+: reward 0\.\d\d, clipped \d\.\d{3}",
    "async_offpolicy": r"step \d+: reward 0\.\d\d, [\d.]+ versions old",
    "tool_agent": r"\[\d\.\d+(, \d\.\d+){3}\] <\|user\|>\d\+\d<\|end\|><\|assistant\|>.*",
}


def test_each_example_is_run_and_fits_a_screen_or_two() -> None:
    found = {path.stem: path for path in EXAMPLES.glob("*.py")}
    assert found.keys() == LINES.keys()
    for path in found.values():
        assert len(path.read_text().splitlines()) < 80


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", LINES)
def test_example(name: str) -> None:
    process = subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py", "3"], capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr
    lines = process.stdout.splitlines()
    assert len(lines) == 3
    for line in lines:
        assert re.fullmatch(LINES[name], line), line
    if name == "tool_agent":
        assert "<|tool|>" in process.stdout
