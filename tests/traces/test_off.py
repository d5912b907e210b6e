"""Tracing is off without OpenTelemetry or without a provider. Each program is a new process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import sglrl

PROGRAM = Path(__file__).with_name("off_program.py")
SAMPLE = ["engine", "call", "turn", "sample"]
CALLS = ["engine", "call", "actor.add"]


@pytest.mark.parametrize(
    ("case", "wanted"),
    [
        # The package is missing; is not imported; is imported; has a provider that does nothing; is
        # disabled by its variable.
        *[(case, ["False"]) for case in ("blocked", "nothing", "api", "no-op", "disabled")],
        # The processes of agents have no provider.
        ("before launch and sample", ["True", *SAMPLE, *CALLS]),
        ("before the sample", ["True", *SAMPLE, *CALLS]),
    ],
)
def test_tracing_needs_a_provider(case: str, wanted: list[str]) -> None:
    env = {**os.environ, **({"OTEL_SDK_DISABLED": "true"} if case == "disabled" else {})}
    done = subprocess.run(
        [sys.executable, PROGRAM, case], capture_output=True, text=True, check=False, env=env
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == wanted


def test_the_function_may_be_in_the_current_folder(tmp_path: Path) -> None:
    (tmp_path / "my_traces.py").write_text('def configure():\n    print("configured")\n')
    # As with an installed command, the path does not contain the current folder.
    program = [sys.executable, "-P", "-c", "import sglrl.tracing as t; t.look_up()"]
    env = {**os.environ, "SGLRL_TRACES": "my_traces:configure"}
    done = subprocess.run(program, capture_output=True, text=True, cwd=tmp_path, env=env)
    assert (done.stdout, done.stderr) == ("configured\n", "")


@pytest.mark.parametrize("function", ["no_module:f", "os:no_function", "os", "builtins:repr"])
async def test_a_wrong_function_that_sets_the_provider(
    function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLRL_TRACES", function)
    with pytest.raises(sglrl.UsageError, match=f"SGLRL_TRACES={function} must be the module:name"):
        await sglrl.launch("tiny", engine="fake", vocab_size=512)
