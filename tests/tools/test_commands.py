"""The commands as a user runs them, in their own processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import msgspec
import psutil
import pytest

import sglrl
from sglrl.__main__ import main
from sglrl.tools.check import run as check_run
from sglrl.tools.check.report import Report

# Importing SGLang takes 20 s on an idle machine, and longer on a busy machine.
PROGRESS = ("model: ", "start: ", "rollouts: ", "checking logprobs: ")
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def check(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[subprocess.CompletedProcess[str], Path]:
    """Run a small check on real SGLang workers.

    Returns:
        The finished process, and the JSON file that it wrote. The folder of its temporary files is
        beside that file.
    """
    file = tmp_path_factory.mktemp("check") / "check.json"
    temporary = file.with_name("tmp")
    temporary.mkdir()
    options = [
        "--rollouts",
        "34",
        "--in-flight",
        "34",
        "--max-new-tokens",
        "8",
        "--json",
        str(file),
    ]
    process = subprocess.run(
        [sys.executable, "-m", "sglrl", "check", *options],
        env={**os.environ, "TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        check=False,
    )
    return process, file


def test_check_passes_with_real_workers(
    check: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    process, file = check
    assert process.returncode == 0, process.stderr
    report = msgspec.json.decode(file.read_bytes(), type=Report)
    assert report.passed
    assert report.rollouts == 34
    # There are nine tasks with up to four samples each. The fourth task has two turns, the eighth
    # three.
    assert report.requests == 34 + 4 + 8
    assert report.logprobs.tokens == report.generated_tokens <= 8 * report.requests
    assert report.logprobs.largest_difference <= report.logprobs.tolerance == 1e-4
    assert {w.worker for w in report.workers} == {0, 1}
    assert 0 < report.cache_hit_rate <= report.ideal_cache_hit_rate < 1


def test_check_shows_what_it_writes_and_nothing_of_its_libraries(
    check: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    process, file = check
    report = msgspec.json.decode(file.read_bytes(), type=Report)
    for value in (
        f"{report.requests:,} in {report.seconds:.2f} s",
        f"{report.tokens_per_second:,.0f} generated",
        f"{report.cache_hit_rate:.1%}",
    ):
        assert value in process.stdout
    for line in process.stderr.splitlines():
        assert line.startswith(PROGRESS), line


def test_check_leaves_no_temporary_file(
    check: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    _, file = check
    # Compilers of other libraries keep folders for the next run. Their names do not start like
    # this. W&B, which SGLang imports where it is installed, leaves two empty folders.
    names = [path.name for path in file.with_name("tmp").iterdir()]
    ours = [name for name in names if name.startswith(("tmp", "sglrl")) and "wandb" not in name]
    assert ours == []


def test_check_fails_when_logprobs_are_not_the_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # The fake engine's logprobs belong to no model. Everything else works as usual.
    monkeypatch.setattr(check_run, "launch", partial(sglrl.launch, engine="fake", vocab_size=512))
    file = tmp_path / "check.json"
    with pytest.raises(SystemExit) as exit_:
        main(["check", "--rollouts", "5", "--max-new-tokens", "4", "--json", str(file)])
    assert exit_.value.code == 1
    report = msgspec.json.decode(file.read_bytes(), type=Report)
    assert not report.passed
    assert report.logprobs.largest_difference > report.logprobs.tolerance
    assert "FAILED" in capsys.readouterr().out


@contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-m", "sglrl", "check", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


@pytest.mark.parametrize(
    "line",
    [
        pytest.param("start: importing", id="while SGLang is imported"),
        pytest.param("rollouts: 1 of 8", id="while workers decode"),
    ],
)
def test_interrupt_leaves_no_process_and_one_line(line: str) -> None:
    with started("--rollouts", "8", "--in-flight", "1", "--max-new-tokens", "256") as process:
        assert process.stderr is not None
        for text in process.stderr:
            if text.startswith(line):
                break
        family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read().splitlines()
        assert process.wait() == 130
        assert [text for text in rest if not text.startswith(PROGRESS)] == ["interrupted"]
        _, alive = psutil.wait_procs(family, timeout=300)
        assert family
        assert not alive
