"""The benchmarks run.

They use the fabric's parts where the client expects a pool, and must follow changes of the client.
"""

from __future__ import annotations

import asyncio
import csv
import json
import os
import subprocess
import sys
from functools import partial
from operator import truediv
from pathlib import Path
from typing import Any

import pytest
import typer

from bench import features
from bench.genlm_parts import NEW_TOKENS, PREFIXES, PROMPT_TOKENS, measure
from bench.report import Report

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


def measured(document: dict[str, Any]) -> dict[str, float | None]:
    """Return the figures that a bench compares with targets."""
    return {target["name"]: target["measured"] for target in document["asked"]}


def test_the_fabric_bench_measures_all_but_its_peers(tmp_path: Path) -> None:
    options = ["--no-peers", "--address", "ipc", "--quick"]
    document = run_bench("fabric", *options, file=tmp_path / "fabric.json")
    results = document["results"]
    ways = {name for name, result in results.items() if "latency" in result}
    assert ways == {"sglrl ipc", "sglrl actor", "transport alone (ipc)"}
    for name in ways:
        assert 0 < results[name]["latency"]["p50_us"] <= results[name]["latency"]["p99_us"]
    in_memory = {name for name, result in results.items() if "rates" in result} - ways
    assert len(in_memory) == 4
    for name in ways | in_memory:
        for rate in results[name]["rates"].values():
            assert min(rate["rate"], rate["loop_us"], rate["cpu_us"]) > 0
    # A task that makes a call holds at least what a task without one holds.
    task, call = (results[f"waiting {what}"]["allocated_bytes"] for what in ("tasks", "calls"))
    assert 0 < task < call
    figures = measured(document)
    assert figures["requests/s at 512 in flight"] == results["sglrl ipc"]["rates"]["512"]["rate"]
    assert {name for name, figure in figures.items() if figure is None} == {
        "times HTTP",
        "times Ray",
    }


def test_the_rollout_bench_measures_all_but_its_peer(tmp_path: Path) -> None:
    options = ["--no-peers", "--quick", "--agents", "64", "--replicas", "1"]
    document = run_bench("rollout", *options, file=tmp_path / "rollout.json")
    results = document["results"]
    ways = results["busy"]["ways"]
    assert len(ways) == 3
    assert all(0 < way["busy"] < 2 for way in ways.values())
    assert results["with and without tools"].keys() == {"ids", "template", "renderer"}
    figures = measured(document)
    assert len(figures) == 6
    assert None not in figures.values()
    per_turn = results["sglrl.rollout"]["cpu_us"]
    assert figures["turns/s of a driver core, all threads"] == pytest.approx(1e6 / per_turn)


def test_the_gateway_bench_measures_the_cost_of_http(tmp_path: Path) -> None:
    options = ["--conversations", "8", "--repeat", "1"]
    document = run_bench("gateway", *options, file=tmp_path / "gateway.json")
    (row,) = document["found"]["cost"]["rows"]
    assert row["gateway_us"] > row["direct_us"] > 0
    (target,) = document["asked"]
    assert target["measured"] == pytest.approx(row["gateway_us"] - row["direct_us"])
    assert target["verdict"] == ("ok" if target["measured"] <= target["asked"] else "short")


@pytest.mark.parametrize("system", ["sglrl", "trl", "torchrl"])
def test_the_trainers_bench_trains_with_each_system(system: str, tmp_path: Path) -> None:
    options = ["--quick", "--system", system, "--output", str(tmp_path)]
    options += ["--plot", str(tmp_path / "plot.png")]
    document = run_bench("trainers", *options, file=tmp_path / "trainers.json")
    (figures,) = document["systems"].values()
    assert figures["steps"] == 2
    assert not figures["reached"]
    assert min(figures["startup_s"], figures["train_s"], figures["tokens_per_s"]) > 0
    with (tmp_path / system / "log.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["0", "1", "2"]
    assert all(0 <= float(row["heldout"]) <= 1 for row in rows)
    assert all(float(row["tokens_per_s"]) > 0 and row["reward"] for row in rows[1:])
    assert (tmp_path / "plot.png").stat().st_size > 0


async def test_the_genlm_bench_asks_for_prompts_that_grow() -> None:
    asked: list[list[int]] = []

    async def ask(ids: list[int]) -> None:
        asked.append(ids)

    found = await measure(ask, 512, lambda text: None, tasks=(20,), seconds=0.0)
    for kind, repetitions in zip(
        PREFIXES, (asked[: len(asked) // 2], asked[len(asked) // 2 :]), strict=True
    ):
        row = found[kind]["20"]
        assert row["queries_per_s"] > 0
        assert row["blocked_ms"] >= 0
        # The first repetition is the warm-up.
        assert len(repetitions) == (1 + len(row["all_queries_per_s"])) * 20 * NEW_TOKENS
        last = repetitions[-20 * NEW_TOKENS :]
        last = [ids for ids in last if len(ids) == PROMPT_TOKENS + NEW_TOKENS - 1]
        assert len(last) == 20
        prompts = {tuple(ids[:PROMPT_TOKENS]) for ids in last}
        assert len(prompts) == 20
        assert len({ids[: PROMPT_TOKENS - 2] for ids in prompts}) == (1 if kind == "shared" else 20)
        assert all(
            ids[:n] in repetitions
            for ids in last
            for n in range(PROMPT_TOKENS, PROMPT_TOKENS + NEW_TOKENS)
        )


def test_a_report_compares_figures_with_targets(tmp_path: Path) -> None:
    report = Report("made up", tmp_path / "report.json")
    report.target("rate", 10, 10.0)
    report.target("rate", 10, 9.0)
    report.target("time", 10, 10.0, "ms", at_most=True)
    report.target("time", 10, 11.0, "ms", at_most=True)
    report.target("time", 10, None, "ms", at_most=True)
    report.finish(results={"system": 1.5})
    document = json.loads((tmp_path / "report.json").read_text())
    verdicts = [target["verdict"] for target in document["asked"]]
    assert verdicts == ["ok", "short", "ok", "short", "not measured"]
    assert document["bench"] == "made up"
    assert document["results"] == {"system": 1.5}
    assert document["machine"]["cores"] >= 1


def test_a_system_that_fails_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = Report("made up", tmp_path / "report.json")
    # ``callable`` gets the function that shows notes. A number cannot be divided by it.
    plan = {"works": callable, "fails": partial(truediv, 1)}
    assert report.measure(plan, of="case: ") == {"works": True}
    assert report.measure({"hangs": partial(asyncio.sleep, 600)}, limit=2.0) == {}
    with pytest.raises(typer.Exit) as exit_status:
        report.finish(may_fail=["hangs"])
    assert exit_status.value.exit_code == 1
    failed = json.loads((tmp_path / "report.json").read_text())["failed"]
    assert failed["case: fails"].startswith("TypeError: unsupported operand")
    assert failed["hangs"] == "took longer than 2 s"
    report.finish(may_fail=["hangs", "case: fails"])
    with pytest.raises(typer.Exit):
        report.finish(may_fail=["hangs", "case: fails"], ok=False)


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
    assert features.used_memory("cuda") == 17
