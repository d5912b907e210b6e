"""The benches run: the fabric's parts stand where the client expects a pool, and must follow it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def run_bench(name: str, *options: str, file: Path) -> dict[str, Any]:
    process = subprocess.run(
        [sys.executable, "-m", f"bench.{name}", *options, "--json", str(file)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    document: dict[str, Any] = json.loads(file.read_text())
    assert document["failed"] == {}
    return document


def test_the_fabric_bench_measures_all_but_its_peers(tmp_path: Path) -> None:
    options = ["--no-peers", "--address", "ipc", "--seconds", "0.05", "--repeats", "1", "--quick"]
    document = run_bench("fabric", *options, file=tmp_path / "fabric.json")
    assert len(document["results"]) == 8


def test_the_rollout_bench_measures_all_but_its_peer(tmp_path: Path) -> None:
    options = ["--no-peers", "--quick", "--agents", "64", "--replicas", "1"]
    document = run_bench("rollout", *options, file=tmp_path / "rollout.json")
    ways = document["results"]["busy"]["ways"]
    assert len(ways) == 3
    assert all(0 < way["busy"] < 2 for way in ways.values())
    assert [target["measured"] for target in document["asked"]] != [None, None]
