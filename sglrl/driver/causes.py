"""The cause of a process's death in words, from its exit status and the end of its output."""

from __future__ import annotations

import re
from pathlib import PurePath
from signal import SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGKILL, SIGSEGV, SIGSYS, SIGTRAP, Signals
from typing import Final

import msgspec

from .oom_counter import OomCounter

_MAX_LENGTH: Final = 300
"""Maximum characters of a line of output in a cause or a log entry."""

_CRASHES: Final = (SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGSEGV, SIGSYS, SIGTRAP)
"""The signals that a process receives because of its own fault."""

_TRACEBACK: Final = "Traceback (most recent call last):"
_GROUP: Final = re.compile(r"^ +(\| ?|(?=\+-))")
_BETWEEN: Final = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
"""The lines that Python prints between the tracebacks of one chain."""

_GPU_ERRORS: Final = (
    ("CUDA out of memory", re.compile(r"CUDA out of memory\. (Tried .*? is free|.*)")),
    ("CUDA error", re.compile(r"(?:CUDA|CUDART|CUDA driver) error: (.+)")),
    ("NCCL error", re.compile(r"NCCL error(?: in: \S+,|:) (.+)")),
    ("NCCL error", re.compile(r"(Watchdog caught collective operation timeout: .+)")),
)
"""The errors of torch and SGLang (``cuda_wrapper.py``, ``pynccl_wrapper.py``), with details."""

_THROWN: Final = re.compile(r"^ +what\(\): +(.+)$", re.MULTILINE)
"""The text of a C++ exception that ended a process."""
_FATAL: Final = "Fatal Python error: "
_CURRENT: Final = "Current thread 0x"
_FRAME: Final = re.compile(r'^ +File "(.+)", line (\d+) in (.+)$')

_BAR: Final = re.compile(r"^[^\r]*?\d+%\|[^]]*\]|^.*\d+(it|B) \[\d+:\d+.*\]$")
"""A progress bar of tqdm, with or without a total."""
_NOISE: Final = re.compile(
    r"Search for `cuda|CUDA kernel errors might be|For debugging consider passing CUDA_LAUNCH|"
    r"Compile with `TORCH_USE_CUDA_DSA|Device-side assertion|Exception raised from |frame #\d+:|"
    r"Extension modules: "
)
"""Begins the lines that torch and faulthandler print after every error."""
_WARNING: Final = re.compile(r"^\S+:\d+: \w*Warning: .*\n?(?:  .*\n?)?", re.MULTILINE)
"""A warning of Python, with the line of code that it shows."""


class Cause(msgspec.Struct, frozen=True):
    """Why a process died. ``str(cause)`` is one line.

    reason: the kind of death, the same for equal deaths.
    detail: the error of this death. May be empty.
    """

    reason: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}" if self.detail else self.reason


def cause_of_death(
    status: int, output: str, before: OomCounter | None = None, after: OomCounter | None = None
) -> Cause:
    """Return why a process died.

    Args:
        status: the exit status. A negative status is the number of a signal.
        output: the end of what the process wrote to stdout and stderr.
        before: the kernel's counter of kills at the start of the process. None: unknown.
        after: the counter after the death.
    """
    if status == -SIGKILL:
        return Cause(_killed(before, after))
    if -status in _CRASHES:
        thrown = _THROWN.findall(output) if status == -SIGABRT else []
        detail = thrown[-1][:_MAX_LENGTH] if thrown else ""
        crashed = Cause(f"crashed with {signal_name(-status)}{_crash_place(output)}", detail)
        return _gpu_error([detail]) or crashed
    if status < 0:
        return Cause(f"killed by {signal_name(-status)}")
    exited = Cause(f"exited with status {status}", last_exception(output) if status else "")
    return (_gpu_error(_last_chain(output)) if status else None) or exited


def signal_name(number: int) -> str:
    """Return the name of a signal, for example "SIGKILL"."""
    try:
        return Signals(number).name
    except ValueError:
        return f"signal {number}"


def _killed(before: OomCounter | None, after: OomCounter | None) -> str:
    if before is None or after is None or before.owner != after.owner:
        return "killed by SIGKILL, by another process or the kernel"
    rise = after.kills - before.kills
    if rise <= 0:
        return "killed by SIGKILL (the kernel counted no out-of-memory kill)"
    return (
        f"killed by the kernel because memory ran out (SIGKILL; the {after.owner}'s out-of-memory "
        f"counter rose by {rise})"
    )


def _gpu_error(lines: list[str]) -> Cause | None:
    """Return the first error of CUDA or NCCL, or None."""
    for line in lines:
        for reason, pattern in _GPU_ERRORS:
            # The indented lines of a traceback are source code.
            if not line[:1].isspace() and (found := pattern.search(line)):
                return Cause(reason, found[1][:_MAX_LENGTH].rstrip("."))
    return None


# --- tracebacks -----------------------------------------------------------------------------------


def last_exception(output: str) -> str:
    """Return the exception of the last traceback in an output, or "" if there is no traceback.

    The result is the line with the type and message, and has at most 300 characters. If the
    traceback has an exception group, the result is the last exception of the group.
    """
    lines = _last_chain(output)
    begins = [i for i, line in enumerate(lines) if line.endswith(_TRACEBACK)]
    for line in lines[begins[-1] + 1 :] if begins else ():
        if line and not line[0].isspace() and not line.startswith("+-"):
            return line[:_MAX_LENGTH]
    return ""


def _last_chain(output: str) -> list[str]:
    """Return the lines from the last traceback, and from the tracebacks of its causes, on."""
    # Python indents the lines of an exception in a group with spaces and "|".
    lines = [_GROUP.sub("", line) for line in output.splitlines()]
    begin, follows = len(lines), False
    for i, line in enumerate(lines):
        if line.endswith(_TRACEBACK):
            begin = begin if follows else i
            follows = False
        elif line:
            follows = line in _BETWEEN or line.startswith("+-")
    return lines[begin:]


def _crash_place(output: str) -> str:
    """Return where a process crashed, if faulthandler has written the stacks."""
    frames = _crash_frames(output)
    found = _FRAME.match(frames[0]) if frames else None
    if found is None:
        return ""
    return f" in {found[3]} ({PurePath(found[1]).name}:{found[2]}; the log has the Python stack)"


def _crash_frames(output: str) -> list[str]:
    """Return the stack of the thread that crashed, the latest call first. May be empty."""
    _, fatal, stacks = output.rpartition(_FATAL)
    _, current, stack = stacks.partition(_CURRENT)
    frames = []
    for line in stack.splitlines()[1:] if fatal and current else ():
        if not _FRAME.match(line):
            break
        frames.append(line)
    return frames


# --- output ---------------------------------------------------------------------------------------


def last_lines(status: int, output: str, most: int) -> list[str]:
    """Return the lines of an output that matter most after a death, at most ``most``.

    These are the last lines, without blank lines, progress bars, Python's warnings and the advice
    that torch adds to every error. After a crash, they are the latest calls of the thread that
    crashed.
    """
    frames = _crash_frames(output) if -status in _CRASHES else []
    if frames:
        return frames[:most]
    output = _WARNING.sub("", output)
    lines = (_BAR.sub("", line).rstrip() for line in output.splitlines())
    return [line[:_MAX_LENGTH] for line in lines if line.strip() and not _NOISE.match(line)][-most:]
