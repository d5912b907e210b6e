"""The output of workers: kept in ``log_dir``, or for a worker that fails."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

import sglrl
from sglrl.driver import worker_logs


class Talker(sglrl.Actor):
    """Prints lines, and can end its process."""

    def __init__(self, fail: bool = False) -> None:
        for i in range(100):
            print(f"line {i}", flush=True)
        if fail:
            raise ValueError("no such file")

    @sglrl.endpoint
    async def leave(self) -> None:
        print("leaves", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    @sglrl.endpoint
    async def pid(self) -> int:
        return os.getpid()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SGLRL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def texts(folder: Path) -> dict[str, str]:
    """Return the content of each log by the end of its name, without time and process id."""
    found = sorted(folder.iterdir()) if folder.exists() else []
    return {path.name.split("-", 3)[-1]: path.read_text() for path in found}


async def lose(actors: sglrl.ActorHandle) -> None:
    with pytest.raises(sglrl.WorkerLost):
        await actors[0].leave()
    await actors.wait_until_full()


async def test_a_folder_has_the_logs_of_all_processes(
    tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "new" / "logs"
    async with sglrl.spawn(Talker, replicas=2, log_dir=folder) as actors:
        await lose(actors)
    logs = texts(folder)
    assert [*logs] == ["worker-0-1.log", "worker-0.log", "worker-1.log"]
    everything = "".join(f"line {i}\n" for i in range(100))
    assert logs["worker-1.log"] == logs["worker-0-1.log"] == everything
    assert logs["worker-0.log"] == everything + "leaves\n"
    (lost,) = [line for line in caplog.messages if "was lost" in line]
    first, *last, where = lost.splitlines()
    assert first.startswith("worker 0 was lost: killed by SIGKILL")
    assert last == ["  line 96", "  line 97", "  line 98", "  line 99", "  leaves"]
    assert where.startswith(f"  (the whole log: {folder}/")
    assert where.endswith("worker-0.log)")
    assert texts(cache / "logs") == {}


async def test_the_log_of_a_lost_worker_is_kept(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with sglrl.spawn(Talker, replicas=2) as actors:
        await lose(actors)
    assert [*texts(cache / "logs")] == ["worker-0.log"]
    assert texts(cache / "logs")["worker-0.log"].endswith("line 99\nleaves\n")
    assert str(cache / "logs") in caplog.text


async def test_an_error_names_the_log(cache: Path) -> None:
    with pytest.raises(sglrl.WorkerStartError) as caught:
        await sglrl.spawn(Talker, True)
    log = caught.value.log
    assert f"Last output of the worker ({log}):" in str(caught.value)
    assert log.startswith(str(cache / "logs"))
    text = texts(cache / "logs")["worker-0.log"]
    assert text.startswith("line 0\n")
    assert "ValueError: no such file" in text


async def test_no_more_than_the_latest_are_kept(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_logs, "_MOST", 2)
    async with sglrl.spawn(Talker) as actors:
        for _ in range(3):
            await lose(actors)
    assert [*texts(cache / "logs")] == ["worker-0-1.log", "worker-0-2.log"]


async def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(sglrl.UsageError, match=r"log_dir .*file/logs cannot be made: Not a dir"):
        await sglrl.spawn(Talker, log_dir=tmp_path / "file" / "logs")
