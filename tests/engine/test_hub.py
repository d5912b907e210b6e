"""A model on the hub cannot be fetched: the error has a few lines, whatever the libraries raise."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import snapshot_download

from sglrl_workers.engine.sglang.hub import unfetched

NAME = "some-owner/no-such-model"
LAUNCHES = f"""
import asyncio, sglrl

async def main():
    async with sglrl.launch({NAME!r}, device="cpu"):
        pass

try:
    asyncio.run(main())
except sglrl.WorkerStartError as error:
    print(error)
"""


def test_without_a_network() -> None:
    # The test needs its own process, because the library reads the variable at its import.
    program = subprocess.run(
        [sys.executable, "-c", LAUNCHES],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=110,
    )
    first, _, _, *output = program.stdout.splitlines()
    assert first == "worker 0 ended before it was ready: exited with status 1"
    said = output.index(f"{NAME!r} could not be fetched from the hub:")
    assert "We couldn't connect to" in output[said + 1]
    assert "outgoing traffic has been disabled" in output[said + 2]
    assert output[said + 3].startswith("Check its name and the network")
    assert len(output) == said + 4
    assert "Traceback" not in program.stdout


def test_only_what_comes_from_the_hub(tmp_path: Path) -> None:
    try:
        snapshot_download(NAME, cache_dir=tmp_path, local_files_only=True)
    except Exception as error:
        said, local = unfetched(NAME, error), unfetched(str(tmp_path), error)
    assert said is not None
    assert said.startswith(f"{NAME!r} could not be fetched from the hub:\n  LocalEntryNotFoundErr")
    assert local is None
    assert unfetched(NAME, RuntimeError("no room for the model")) is None


def test_what_is_raised_on_the_way_is_told_once() -> None:
    hub = type("HubError", (Exception,), {"__module__": "huggingface_hub.errors"})
    with pytest.raises(OSError, match="cannot") as caught:
        try:
            try:
                raise ConnectionError("no route")
            except ConnectionError as error:
                raise hub("no route") from error
        except hub as error:
            raise OSError("cannot load\nit") from error
    said = unfetched(NAME, caught.value)
    assert said is not None
    assert said.splitlines()[1:-1] == ["  OSError: cannot load", "  HubError: no route"]
