"""The examples in the documents work, and the names in the documents exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from sglrl.tools.tiny_model import tiny_model

ROOT = Path(__file__).parents[2]


def test_the_readmes_example_runs_as_a_plain_script(tmp_path: Path) -> None:
    code, *_ = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    model = '"Qwen/Qwen3-0.6B", replicas=1'
    assert code.count(model) == 1
    script = tmp_path / "example.py"
    script.write_text(code.replace(model, f'{str(tiny_model())!r}, engine="fake", vocab_size=512'))
    process = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    lines = [line.split() for line in process.stdout.splitlines()]
    assert len(lines) == 256
    # Each line has 64 tokens, the sum of the fake engine's logprobs, and the judge's reward.
    assert {length for length, _, _ in lines} == {"64"}
    assert {float(total) for _, total, _ in lines} == {-64 * 65 / 2 / 1024}
    assert {reward for _, _, reward in lines} <= {"0.0", "1.0"}


@pytest.mark.parametrize(
    "document",
    [
        "README.md",
        "CONTRIBUTING.md",
        "docs/architecture.md",
        "docs/engine.md",
        "docs/genlm.md",
        "docs/performance.md",
    ],
)
def test_files_that_a_document_names_exist(document: str) -> None:
    text = (ROOT / document).read_text()
    named = set(re.findall(r"\b((?:sglrl|workers|tests)/[\w/]+\.py)\b", text))
    named |= {
        str(((ROOT / document).parent / target).resolve().relative_to(ROOT))
        for target in re.findall(r"\]\(([^)#:]+)\)", text)
    }
    assert named
    missing = [name for name in sorted(named) if not (ROOT / name).exists()]
    assert not missing
