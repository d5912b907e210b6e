"""The fabric bench runs: its parts stand where the client expects a pool, and must follow it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_fabric_bench_measures_all_but_its_peers(tmp_path: Path) -> None:
    found = tmp_path / "fabric.json"
    options = ["--no-peers", "--address", "ipc", "--seconds", "0.05", "--repeats", "1", "--quick"]
    process = subprocess.run(
        [sys.executable, "-m", "bench.fabric", *options, "--json", str(found)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    document = json.loads(found.read_text())
    assert document["failed"] == {}
    assert len(document["results"]) == 8
