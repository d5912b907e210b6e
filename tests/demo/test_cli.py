"""``sglrl`` without SGLang: help, doctor, generate with the fake engine, errors as one line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest


def run(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sglrl", *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("command", ["demo", "generate", "doctor"])
def test_help(command: str) -> None:
    process = run(command, "--help")
    assert process.returncode == 0, process.stderr
    assert f"sglrl {command}" in process.stdout


def test_help_lists_the_commands() -> None:
    process = run("--help")
    assert process.returncode == 0
    for command in ("demo", "generate", "doctor"):
        assert command in process.stdout


def test_the_script_is_installed() -> None:
    script = Path(sys.executable).with_name("sglrl")
    process = subprocess.run([script, "--help"], capture_output=True, text=True, check=False)
    assert process.returncode == 0
    assert "doctor" in process.stdout


def test_doctor_makes_a_call() -> None:
    process = run("doctor", "--json")
    assert process.returncode == 0, process.stderr
    findings = {f["name"]: f for f in msgspec.json.decode(process.stdout)}
    assert all(f["ok"] for f in findings.values())
    assert "answer in" in findings["one call (fake)"]["detail"]
    table = run("doctor")
    assert table.returncode == 0
    assert "one call (fake)" in table.stdout


def test_doctor_finds_what_does_not_work() -> None:
    process = run("doctor", "--engine", "vllm", "--json")
    assert process.returncode == 1
    assert "unknown engine 'vllm'" in msgspec.json.decode(process.stdout)[-1]["detail"]


def test_generate_writes_a_line_per_sample() -> None:
    process = run(
        "generate", "tiny", "--engine", "fake", "--json", "--logprobs", "-n", "2",
        "--max-new-tokens", "3", stdin="hello world\nanother one\n",
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    lines = [msgspec.json.decode(line) for line in process.stdout.splitlines()]
    assert [line["prompt"] for line in lines] == ["hello world"] * 2 + ["another one"] * 2
    for line in lines:
        assert len(line["output_ids"]) == 3
        assert line["logprobs"] == pytest.approx([-1 / 1024, -2 / 1024, -3 / 1024])
        assert line["finish_reason"] == "length"


def test_generate_prints_text() -> None:
    process = run("generate", "tiny", "hello world", "--engine", "fake", "--max-new-tokens", "64")
    assert process.returncode == 0, process.stderr
    # The fake engine repeats the prompt.
    assert process.stdout.startswith("hello worldhello world")
    assert process.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", "/no/such/model", "hi"], "no model at '/no/such/model'"),
        (["generate", "tiny", "--engine", "fake"], "there is no prompt"),
        (["generate", "tiny", "hi", "--engine", "fake", "--top-p", "3"], "top_p must be in"),
        (["demo", "--model", "/no/such/model"], "no model at '/no/such/model'"),
        (["demo", "--device", "tpu"], "device must be"),
        (["demo", "--json", "/no/such/folder/x.json"], "there is no such folder"),
        (["demo", "--rollouts", "0"], "--rollouts"),
        (["generate", "tiny", "--temperatur", "1"], "--temperatur"),
    ],
)
def test_wrong_usage_is_one_message_and_exit_code_2(arguments: list[str], words: str) -> None:
    process = run(*arguments)
    assert process.returncode == 2, process.stderr
    assert words in process.stderr
    assert "Traceback" not in process.stderr
