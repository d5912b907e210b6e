"""The benchmarks run.

They use the fabric's parts where the client expects a pool, and must follow changes of the client.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import features
from bench.genlm_parts import measure

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
    options = ["--no-peers", "--address", "ipc", "--quick"]
    document = run_bench("fabric", *options, file=tmp_path / "fabric.json")
    assert len(document["results"]) == 9


def test_the_rollout_bench_measures_all_but_its_peer(tmp_path: Path) -> None:
    options = ["--no-peers", "--quick", "--agents", "64", "--replicas", "1"]
    document = run_bench("rollout", *options, file=tmp_path / "rollout.json")
    ways = document["results"]["busy"]["ways"]
    assert len(ways) == 3
    assert all(0 < way["busy"] < 2 for way in ways.values())
    assert document["results"]["with and without tools"].keys() == {"ids", "template", "renderer"}
    assert [target["measured"] for target in document["asked"]] != [None, None]


def test_the_gateway_bench_measures_the_cost_of_http(tmp_path: Path) -> None:
    options = ["--conversations", "8", "--repeat", "1"]
    document = run_bench("gateway", *options, file=tmp_path / "gateway.json")
    (row,) = document["found"]["cost"]["rows"]
    assert row["gateway_us"] > row["direct_us"] > 0
    assert document["asked"][0]["verdict"] in ("ok", "short")


async def test_the_genlm_bench_asks_for_prompts_that_grow() -> None:
    asked: list[list[int]] = []

    async def ask(ids: list[int]) -> None:
        asked.append(ids)

    kinds = ("shared", "disjoint")
    options = {"prefixes": kinds, "tasks": (20,), "prefix": 8, "new": 3, "seconds": 0.0}
    found = await measure(ask, 512, options, lambda text: None)
    for kind, repetitions in zip(
        kinds, (asked[: len(asked) // 2], asked[len(asked) // 2 :]), strict=True
    ):
        row = found[kind][20]
        assert row["queries_per_s"] > 0
        assert row["blocked_ms"] >= 0
        # The first repetition is the warm-up.
        assert len(repetitions) == (1 + len(row["all_queries_per_s"])) * 20 * 3
        last = [ids for ids in repetitions[-60:] if len(ids) == 10]
        assert len(last) == 20
        prompts = {tuple(ids[:8]) for ids in last}
        assert len(prompts) == 20
        assert len({ids[:6] for ids in prompts}) == (1 if kind == "shared" else 20)
        assert all(ids[:n] in repetitions for ids in last for n in (8, 9))


@pytest.mark.parametrize(
    ("visible", "gpu"), [(None, "0"), ("3,1", "3"), (" 2", "2"), ("GPU-8f", "GPU-8f")]
)
def test_the_memory_of_the_visible_gpu_is_measured(
    visible: str | None, gpu: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f'#!/bin/sh\ncase "$*" in *--id={gpu}) echo 17;; *) echo 99;; esac\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert features._used("cuda") == 17
