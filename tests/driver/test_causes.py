"""The cause of a death, from the exit status and from what torch, NCCL and Python print."""

from __future__ import annotations

import textwrap
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from sglrl.driver import oom_counter
from sglrl.driver.causes import Cause, cause_of_death, last_exception, last_lines
from sglrl.driver.oom_counter import OomCounter, read_oom_counter

ADVICE = """\
Search for `cudaErrorIllegalAddress' in https://docs.nvidia.com/cuda for more information.
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace \
below might be incorrect.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.

"""


def raised(line: str) -> str:
    return f"Traceback (most recent call last):\n{line}\n"


ILLEGAL = f"""\
Traceback (most recent call last):
  File "/w/run.py", line 8, in run
    scheduler.step()
torch.AcceleratorError: CUDA error: an illegal memory access was encountered
{ADVICE}"""

FULL = """\
Traceback (most recent call last):
  File "/w/run.py", line 9, in run
    raise Exception("CUDA error: not this line")
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity \
of 79.11 GiB of which 1.08 GiB is free. Including non-PyTorch memory, this process has \
78.02 GiB in use.
"""

REMOTE = """\
Traceback (most recent call last):
  File "/w/run.py", line 9, in run
    work.wait()
torch.distributed.DistBackendError: NCCL error in: /pytorch/torch/csrc/distributed/c10d/\
NCCLUtils.cpp:77, remote process exited or there was a network error, NCCL version 2.28.9
ncclRemoteError: A call failed possibly due to a network error or a remote process \
exiting prematurely.
Last error:
socketProgress: Connection closed by remote peer
"""

WATCHDOG = """\
terminate called after throwing an instance of 'c10::DistBackendError'
  what():  [PG ID 0 PG GUID 0(default_pg) Rank 3] Process group watchdog thread terminated with \
exception: {}
Exception raised from checkTimeout at /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:632
frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x96 (0x7f in libc10.so)
Fatal Python error: Aborted

Thread 0x00007f0 (most recent call first):
  File "/w/threading.py", line 359 in wait

Current thread 0x00007f1 (most recent call first):
  <no Python frame>
"""
TIMEOUT = (
    "[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4, OpType=BROADCAST) "
    "ran for 600011 milliseconds before timing out."
)

CRASH = """\
loaded
Fatal Python error: Segmentation fault

Thread 0x00007f0 (most recent call first):
  File "/w/threading.py", line 359 in wait

Current thread 0x00007f1 (most recent call first):
  File "/w/kernels.py", line 12 in gather
  File "/w/model.py", line 34 in forward

Thread 0x00007f2 (most recent call first):
  File "/w/main.py", line 1 in <module>

Extension modules: numpy._core._multiarray_umath (total: 1)
"""


@pytest.mark.parametrize(
    ("status", "output", "expected"),
    [
        (0, raised("ValueError: old"), "exited with status 0"),
        (3, "no traceback\n", "exited with status 3"),
        (3, raised("ValueError: no"), "exited with status 3: ValueError: no"),
        (1, ILLEGAL, "CUDA error: an illegal memory access was encountered"),
        (
            1,
            FULL,
            "CUDA out of memory: Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 "
            "GiB of which 1.08 GiB is free",
        ),
        (
            1,
            REMOTE,
            "NCCL error: remote process exited or there was a network error, NCCL version 2.28.9",
        ),
        (1, FULL + raised("KeyError: 1"), "exited with status 1: KeyError: 1"),
        (
            1,
            f"{ILLEGAL}During handling of the above exception, another exception occurred:\n\n"
            + raised("KeyError: 1"),
            "CUDA error: an illegal memory access was encountered",
        ),
        (1, raised("RuntimeError: NCCL error: invalid usage"), "NCCL error: invalid usage"),
        (-6, WATCHDOG.format("CUDA error: misaligned address"), "CUDA error: misaligned address"),
        (-6, WATCHDOG.format(TIMEOUT), "NCCL error: Watchdog caught collective operation timeout"),
        (-6, WATCHDOG.format("out of range"), "crashed with SIGABRT: [PG ID 0"),
        (-11, CRASH, "crashed with SIGSEGV in gather (kernels.py:12; the log has the "),
        (-11, ILLEGAL, "crashed with SIGSEGV"),
        (-7, "", "crashed with SIGBUS"),
        (-15, ILLEGAL, "killed by SIGTERM"),
        (-40, "", "killed by signal 40"),
        (-9, ILLEGAL, "killed by SIGKILL, by another process or the kernel"),
    ],
)
def test_a_cause(status: int, output: str, expected: str) -> None:
    cause = str(cause_of_death(status, output))
    assert cause.startswith(expected)
    assert "\n" not in cause


def test_equal_deaths_have_equal_reasons() -> None:
    less = FULL.replace("2.00 GiB", "3.00 GiB")
    assert cause_of_death(1, FULL).reason == cause_of_death(1, less).reason == "CUDA out of memory"


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (OomCounter("cgroup", 3), OomCounter("cgroup", 3), " (the kernel counted no out-of-"),
        (OomCounter("cgroup", 3), OomCounter("host", 4), ", by another process or the kernel"),
        (None, OomCounter("host", 4), ", by another process or the kernel"),
        (OomCounter("host", 4), None, ", by another process or the kernel"),
    ],
)
def test_a_kill_without_evidence(
    before: OomCounter | None, after: OomCounter | None, expected: str
) -> None:
    assert cause_of_death(-9, "", before, after).reason.startswith(f"killed by SIGKILL{expected}")


@pytest.mark.parametrize("owner", ["cgroup", "host"])
def test_a_kill_with_evidence(owner: str) -> None:
    before, after = OomCounter(owner, 3), OomCounter(owner, 5)
    assert cause_of_death(-9, "", before, after) == Cause(
        f"killed by the kernel because memory ran out (SIGKILL; the {owner}'s out-of-memory "
        "counter rose by 2)"
    )
    assert cause_of_death(-15, "", before, after).reason == "killed by SIGTERM"


V2 = "0::/pod/worker\n"
V1 = "9:name=systemd:/\n4:cpu,memory:/docker/12\n0::/\n"
EVENTS = "low 0\noom 9\noom_kill {}\noom_group_kill 8\n"
CONTROL = "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        (V2, {"sys/fs/cgroup/pod/worker/memory.events": EVENTS}, ("cgroup", 0)),
        (V2, {"sys/fs/cgroup/memory.events": EVENTS, "proc/vmstat": CONTROL}, ("cgroup", 0)),
        (V1, {"sys/fs/cgroup/memory/docker/12/memory.oom_control": CONTROL}, ("cgroup", 0)),
        (
            V1,
            {"proc/vmstat": CONTROL, "sys/fs/cgroup/memory/memory.oom_control": CONTROL},
            ("cgroup", 1),
        ),
        (V2, {"proc/vmstat": "pgfault 7\noom_kill {}\n"}, ("host", 0)),
        (V2, {"proc/vmstat": "pgfault 7\n"}, None),
        ("", {}, None),
    ],
)
def test_the_counter_is_read(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cgroup: str,
    files: dict[str, str],
    expected: tuple[str, int] | None,
) -> None:
    monkeypatch.setattr(oom_counter, "ROOT", tmp_path)
    if cgroup:
        files = {"proc/self/cgroup": cgroup, **files}
    for i, (name, text) in enumerate(files.items(), -1):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.format(i))
    assert read_oom_counter() == (OomCounter(*expected) if expected else None)


def test_lines_that_matter() -> None:
    output = textwrap.dedent("""\
        first

        second
        Loading:  50%|##### | 1/2 [00:01<00:01,  1.0s/it]
        7it [00:02, 3.10it/s]
        Loading: 100%|######| 2/2 [00:02<00:00,  1.0s/it]Traceback (most recent call last):
          File "/w/run.py", line 8, in run
        """)
    assert last_lines(1, output, 9) == [
        "first",
        "second",
        "Traceback (most recent call last):",
        '  File "/w/run.py", line 8, in run',
    ]
    assert last_lines(1, ILLEGAL, 2) == ILLEGAL.splitlines()[2:4]
    assert last_lines(-11, CRASH, 5) == [
        '  File "/w/kernels.py", line 12 in gather',
        '  File "/w/model.py", line 34 in forward',
    ]
    assert last_lines(-9, "a\nb\nc\n", 2) == ["b", "c"]
    assert last_lines(-9, "x" * 1000, 2) == ["x" * 300]
    warned = (
        "loading\n"
        "/lib/multiprocessing/resource_tracker.py:254: UserWarning: there appear to be 1 leaked\n"
        "  warnings.warn('there appear to be %d leaked'\n"
        "ready\n"
        "/lib/torch/common.py:9: DeprecationWarning: old\n"
    )
    assert last_lines(-9, warned, 5) == ["loading", "ready"]


def grouped() -> None:
    failures = []
    for error in (KeyError("first"), ValueError("last\nline")):
        try:
            raise error
        except Exception as raised:
            failures.append(raised)
    raise ExceptionGroup("two", failures)


def chained() -> None:
    try:
        raise KeyError("first")
    except KeyError as error:
        error.add_note("a note")
        raise LookupError("second") from error


def quiet() -> None: ...


@pytest.mark.parametrize(
    ("fails", "expected"),
    [(grouped, "ValueError: last"), (chained, "LookupError: second"), (quiet, "")],
)
def test_the_last_exception_of_an_output(fails: Callable[[], None], expected: str) -> None:
    try:
        fails()
    except Exception:
        text = traceback.format_exc()
    else:
        text = "no exception: ValueError: is a text\n"
    assert last_exception(f"started\n{text}bye\n") == expected


def first_in_a_group() -> None:
    failures = []
    for error in (RuntimeError("CUDA error: unspecified launch failure"), ValueError("last")):
        try:
            raise error
        except Exception as raised:
            failures.append(raised)
    raise ExceptionGroup("two", failures)


def cause_in_a_chain() -> None:
    try:
        raise RuntimeError("CUDA error: unspecified launch failure")
    except RuntimeError as error:
        raise LookupError("second") from error


@pytest.mark.parametrize("fails", [first_in_a_group, cause_in_a_chain])
def test_the_error_of_cuda_is_behind_the_exception(fails: Callable[[], None]) -> None:
    try:
        fails()
    except Exception:
        output = traceback.format_exc()
    assert str(cause_of_death(1, output)) == "CUDA error: unspecified launch failure"
