"""What a user reads when a worker dies: the cause, the last lines and the path of the log."""

from __future__ import annotations

import asyncio
import ctypes
import os
import re
import resource
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Never

import pytest
from processes import strike

import sglrl
from sglrl.driver import fork_server, oom_counter


class AcceleratorError(KeyboardInterrupt):
    """Prints like torch's error. It ends the worker, because it is not an ``Exception``."""

    __module__ = "torch"


class Mortal(sglrl.Actor):
    """Ends its process in different ways."""

    def __init__(self, at_start: str = "") -> None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if at_start:
            self.end(at_start)

    @sglrl.endpoint
    async def serve(self) -> None: ...

    @sglrl.endpoint
    async def die(self, how: str) -> None:
        self.end(how)

    def end(self, how: str) -> Never:
        print("\rLoading:  50%|#####     | 1/2 [00:01<00:01,  1.0s/it]", end="", flush=True)
        print("\rLoading: 100%|##########| 2/2 [00:01<00:00,  1.0s/it]\n\nlast words", flush=True)
        match how.split():
            case ["exit"]:
                try:
                    raise ValueError("no such rubric")
                except ValueError:
                    traceback.print_exc()
                os._exit(3)
            case ["raise"]:
                raise KeyboardInterrupt("the licence has expired")
            case ["cuda"]:
                raise AcceleratorError(
                    "CUDA error: an illegal memory access was encountered\n"
                    "Search for `cudaErrorIllegalAddress' in https://docs.nvidia.com/cuda.\n"
                    "CUDA kernel errors might be asynchronously reported at some other API call.\n"
                    "For debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
                )
            case ["crash"]:
                ctypes.string_at(0)
            case ["counted", file]:
                # As the kernel does it: it counts, then kills.
                path = Path(file)
                path.write_text(path.read_text().replace("oom_kill 4", "oom_kill 5"))
        os.kill(os.getpid(), getattr(signal, how, signal.SIGKILL))
        raise AssertionError("the signal did not end the process")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SGLRL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


CRASH = r"crashed with SIGSEGV in string_at \(__init__.py:\d+; the log has the Python stack\)"
ILLEGAL = "CUDA error: an illegal memory access was encountered"
DEATHS = {
    "exit": ("exited with status 3: ValueError: no such rubric", "ValueError: no such rubric"),
    "raise": (
        "exited with status 1: KeyboardInterrupt: the licence has expired",
        "KeyboardInterrupt: the licence has expired",
    ),
    "cuda": (ILLEGAL, f"torch.AcceleratorError: {ILLEGAL}"),
    "crash": (CRASH, ""),
    "SIGTERM": ("killed by SIGTERM", "last words"),
    "SIGKILL": (r"killed by SIGKILL.*", "last words"),
}
"""By the way to die: the cause, and the last line of output in the log entry."""


async def test_a_loss_has_its_cause(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with sglrl.spawn(Mortal, restarts=len(DEATHS)) as mortal:
        for how, (cause, last) in DEATHS.items():
            caplog.clear()
            # A worker that has served a call is replaced at once.
            await mortal[0].serve()
            with pytest.raises(sglrl.WorkerLost) as caught:
                await mortal[0].die(how)
            assert re.search(cause, str(caught.value))
            assert "\n" not in str(caught.value)
            (entry,) = [text for text in caplog.messages if "was lost" in text]
            first, *lines, where = entry.splitlines()
            assert re.fullmatch(f"worker 0 was lost: {cause}", first)
            assert 1 <= len(lines) <= 5
            if last:
                assert lines[-1] == f"  {last}"
            else:
                assert "in string_at" in lines[0]
                assert re.search(r"test_deaths.py\", line \d+ in end$", lines[1])
            assert not any("%|" in line or not line.strip() for line in lines)
            found = re.fullmatch(r"  \(the whole log: (.+)\)", where)
            assert found
            assert Path(found[1]).is_relative_to(cache)
            log = await asyncio.to_thread(Path(found[1]).read_text)
            assert "last words" in log
            assert ("Fatal Python error: Segmentation fault" in log) == (how == "crash")
            await mortal.wait_until_full()


@pytest.mark.parametrize("how", DEATHS)
async def test_a_failed_start_has_its_cause(how: str) -> None:
    with pytest.raises(sglrl.WorkerStartError) as caught:
        await sglrl.spawn(Mortal, how)
    cause, _ = DEATHS[how]
    assert re.fullmatch(f"worker 0 ended before it was ready: {cause}", caught.value.message)
    assert "last words" in caught.value.output
    assert "50%|" not in caught.value.output


async def test_a_retirement_has_the_causes(caplog: pytest.LogCaptureFixture) -> None:
    async with sglrl.spawn(Mortal, restarts=1) as mortal:
        with pytest.raises(sglrl.WorkerLost):
            await mortal[0].die("cuda")
        await mortal.wait_until_full()
        with pytest.raises(sglrl.WorkerLost):
            await mortal[0].die("SIGTERM")
        with pytest.raises(sglrl.WorkerLost) as caught:
            await mortal.die("")
    history = (
        "killed by SIGTERM (lost 2 times: CUDA error; killed by SIGTERM; the last error: "
        "an illegal memory access was encountered; no more than 1 restart in 60 s)"
    )
    assert f"worker 0 is retired: {history}" in caplog.messages
    assert history in str(caught.value)


async def test_the_connection_breaks_before_the_exit_is_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with sglrl.spawn(Mortal) as mortal:
        # A stopped fork server reports no exit.
        (server,) = [s for s in fork_server._servers.values() if s.preload == "plain" and s.alive]
        strike(server.process.pid, signal.SIGSTOP)
        with pytest.raises(sglrl.WorkerLost, match="its connection is gone"):
            await mortal[0].die("exit")
        os.kill(server.process.pid, signal.SIGCONT)
        await mortal.wait_until_full()
    (entry,) = [text for text in caplog.messages if "was lost" in text]
    assert "does not read: exited with status 3: ValueError: no such rubric\n" in entry


OUT_OF_MEMORY = (
    "killed by the kernel because memory ran out (SIGKILL; the cgroup's out-of-memory counter rose "
    "by 1)"
)


async def test_the_kernels_counter_names_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oom_counter, "ROOT", tmp_path)
    events = tmp_path / "sys/fs/cgroup/pod/memory.events"
    for path, text in ((tmp_path / "proc/self/cgroup", "0::/pod\n"), (events, "oom_kill 4\n")):
        path.parent.mkdir(parents=True)
        path.write_text(text)
    async with sglrl.spawn(Mortal) as mortal:
        for how, cause in (
            (f"counted {events}", OUT_OF_MEMORY),
            ("SIGKILL", "killed by SIGKILL (the kernel counted no out-of-memory kill)"),
        ):
            with pytest.raises(sglrl.WorkerLost) as caught:
                await mortal[0].die(how)
            assert cause in str(caught.value)
            await mortal.wait_until_full()


HUNGRY = """
import asyncio, sglrl

class Hungry(sglrl.Actor):
    @sglrl.endpoint
    async def eat(self) -> int:
        return len(b"x" * (1 << 31))

async def main():
    async with sglrl.spawn(Hungry, restarts=0) as hungry:
        try:
            await hungry[0].eat()
        except sglrl.WorkerLost as error:
            print(error)

asyncio.run(main())
"""


@pytest.fixture
def small_cgroup() -> Iterator[Path]:
    """Make a cgroup below the cgroup of this process, in which 500 MiB of memory can be used."""
    text = Path("/proc/self/cgroup").read_text()
    old = re.search(r"^\d+:(?:.*,)?memory(?:,.*)?:/(.*)$", text, re.MULTILINE)
    new = re.search(r"^0::/(.*)$", text, re.MULTILINE)
    top, names = Path("/sys/fs/cgroup"), ("memory.max", "memory.swap.max")
    if old:
        top, names = top / "memory", ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes")
    found = old or new
    group = top / (found[1] if found else "") / f"sglrl-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    try:
        if not (group / names[0]).exists():
            pytest.skip("a cgroup has no limit of memory here")
        (group / names[0]).write_text(str(500 << 20))
        if (group / names[1]).exists():
            (group / names[1]).write_text(str(500 << 20) if old else "0")
        yield group
    finally:
        group.rmdir()


ENTER = 'echo $$ > "$0"/cgroup.procs && exec "$@"'


def test_memory_runs_out(small_cgroup: Path) -> None:
    """The kernel really kills a worker."""
    done = subprocess.run(
        ["sh", "-c", ENTER, str(small_cgroup), sys.executable, "-c", HUNGRY],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, (done.returncode, done.stdout, done.stderr)
    assert OUT_OF_MEMORY in done.stdout
    assert f"worker 0 was lost: {OUT_OF_MEMORY}" in done.stderr
