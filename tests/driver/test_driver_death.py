"""The driver of real engines is killed: no process, socket or shared memory remains."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from processes import descendants, wait_for_end

PROGRAM = """
import asyncio, sys
import sglrl

async def main():
    async with sglrl.launch(sys.argv[1], device="cpu", replicas=2) as client:
        stream = client.stream(input_ids=[5, 6, 7], max_new_tokens=1000, ignore_eos=True)
        print("ready", flush=True)
        async for _ in stream:
            print("serving", flush=True)

asyncio.run(main())
"""


def shared_files() -> set[str]:
    """Return the files of shared memory.

    joblib makes a semaphore and removes it while it is imported. A process that is killed meanwhile
    leaves the semaphore.
    """
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.loky-")}


@pytest.mark.alone  # files of concurrent tests in /dev/shm would look like leftovers of the driver
@pytest.mark.parametrize("stage", ["importing", "serving"])
def test_nothing_outlives_the_driver(
    qwen: Path, tmp_path_factory: pytest.TempPathFactory, stage: str
) -> None:
    # The path must be short, because names of unix sockets are short.
    folder = Path(tmp_path_factory.mktemp("d"))
    shared = shared_files()
    driver = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(qwen)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(folder)},
    )
    if stage == "serving":
        assert driver.stdout is not None
        while driver.stdout.readline().strip() != "serving":
            assert driver.poll() is None, "the driver ended by itself"
    else:
        while not descendants(driver.pid):
            assert driver.poll() is None, "the driver ended by itself"
    below = list(descendants(driver.pid))
    assert below
    driver.send_signal(signal.SIGKILL)
    driver.communicate(timeout=300)
    assert wait_for_end(below, 5.0) == []
    # SGLang and torch leave their own files, so only ours are checked.
    assert not list(folder.glob("sglrl-*")), "sockets or logs were left"
    assert shared_files() <= shared
