"""The examples, as a user runs them, for a few steps."""

from __future__ import annotations

import re
import runpy
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
# What other packages warn of on import is not for the user of an example.
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", LINES)
async def test_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In this process, so that they share its fork server, which imports SGLang once."""
    example = runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name=name)
    await example["main"](3)
    # TorchRL logs to standard output.
    lines = [line for line in capsys.readouterr().out.splitlines() if "[torchrl]" not in line]
    assert len(lines) == 3
    for line in lines:
        assert re.fullmatch(LINES[name], line), line
    if name == "tool_agent":
        assert any("<|tool|>" in line for line in lines)
