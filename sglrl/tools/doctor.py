"""Examine this machine and test whether sglrl works on it: ``sglrl doctor``."""

from __future__ import annotations

import asyncio
import os
import platform
import subprocess
import sys
import time
from importlib import metadata
from importlib.util import find_spec

import msgspec
from rich.table import Column, Table

from .. import __version__
from ..config import install
from ..errors import SglrlError
from ..inference.display import can_redraw
from ..launching.argument_table import counted, listed
from ..launching.engine_fields import COMPUTED, engine_fields
from ..launching.launch import cuda_devices, launch

NEEDED = ("msgspec", "pyzmq", "uvloop", "numpy")
OPTIONAL = ("sglang", "torch", "transformers")
SGLANG_RANGE = ((0, 5, 17), (0, 5, 24))
"""The range of supported SGLang versions: the first supported and the first unsupported version."""


class Finding(msgspec.Struct, frozen=True):
    """One line of the examination. ``ok`` is False if this finding keeps sglrl from working."""

    name: str
    ok: bool
    detail: str


class ArgumentRow(msgspec.Struct, frozen=True):
    """One argument of SGLang.

    Attributes:
        field: the name of the argument.
        type: the type as SGLang's source code writes it.
        default: the default value as SGLang's source code writes it, or "computed".
        state, note: the treatment by ``launch``, as in ``argument_table.Argument``.
    """

    field: str
    type: str
    default: str
    state: str
    note: str


def examine(engine: str) -> list[Finding]:
    """Return all findings. The last finding is the result of a real call to one worker."""
    findings = [
        Finding("sglrl", True, __version__),
        Finding("python", True, f"{platform.python_version()} on {platform.system()}"),
        Finding(
            "processes",
            hasattr(os, "pidfd_open"),
            "Linux, workers end with their driver"
            if hasattr(os, "pidfd_open")
            else "worker processes need Linux 5.3 or later",
        ),
    ]
    findings += [_package(name, needed=True) for name in NEEDED]
    findings += [_package(name, needed=engine == "sglang") for name in OPTIONAL]
    findings += _patches()
    findings += _arguments()
    gpus = cuda_devices()
    findings.append(Finding("GPUs", True, f"{len(gpus)} visible" if gpus else "none: CPU only"))
    findings.append(Finding("CPUs", True, f"{os.cpu_count()} cores, {_memory()}"))
    findings.append(asyncio.run(_call(engine)))
    return findings


def _package(name: str, *, needed: bool) -> Finding:
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        hint = install("sglang") if name in OPTIONAL else "reinstall sglrl"
        return Finding(name, not needed, f"not installed ({hint})")
    if name == "sglang":
        release = tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
        first, beyond = (".".join(map(str, v)) for v in SGLANG_RANGE)
        if not SGLANG_RANGE[0] <= release < SGLANG_RANGE[1]:
            return Finding(name, not needed, f"{version}; supported are {first} to below {beyond}")
    return Finding(name, True, version)


def _patches() -> list[Finding]:
    """Return a finding for each patch of SGLang: whether it fits the installed SGLang."""
    if find_spec("sglang") is None:
        return []
    # The library must not import the workers' code, so a separate process lists the patches.
    table = subprocess.run(
        [sys.executable, "-m", "sglrl_workers.engine.sglang.patch_table"],
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=60,
    )
    if table.returncode:
        *_, last = ["no reason given", *table.stderr.splitlines()]
        return [Finding("patches", False, f"cannot be listed: {last}")]
    return [_patch(row) for row in msgspec.json.decode(table.stdout)]


def _patch(row: dict[str, str]) -> Finding:
    """Describe one patch. ``ok`` is False if a correction does not fit: no worker would start."""
    kind = row["kind"] + (f" for {row['device']}" if row["device"] else "")
    detail = f"{kind}; without it, {row['why']}"
    if row["unknown"]:
        detail = f"{kind}, does not fit this SGLang: {row['unknown']}"
    optional = row["kind"] == "acceleration"
    return Finding(f"patch {row['name']}", optional or not row["unknown"], detail)


def _arguments() -> list[Finding]:
    """Return a finding with the number of SGLang's arguments in each state."""
    if find_spec("sglang") is None:
        return []
    detail = f"{counted(engine_fields())}; --arguments lists them"
    return [Finding("arguments of SGLang", True, detail)]


def argument_rows() -> list[ArgumentRow]:
    """Return a row for each argument of the installed SGLang.

    Raises:
        UsageError: sglang is not installed.
    """
    fields = engine_fields()
    return [
        ArgumentRow(
            name,
            fields[name].name,
            "computed" if fields[name].default is COMPUTED else repr(fields[name].default),
            argument.state,
            argument.note,
        )
        for name, argument in listed(fields)
    ]


def argument_lines(rows: list[ArgumentRow]) -> str:
    """Return a line of text for each row. A line may be longer than the terminal is wide."""
    widths = [max(len(row.field) for row in rows), max(len(row.state) for row in rows)]
    return "".join(
        f"{row.field:{widths[0]}}  {row.state:{widths[1]}}  {row.note}\n" for row in rows
    )


def _memory() -> str:
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return f"{size / 2**30:.0f} GiB of memory"


async def _call(engine: str) -> Finding:
    """Start one worker on CPU and generate one token.

    This tests processes, sockets and codecs.
    """
    name = f"one call ({engine})"
    begun = time.perf_counter()
    model = "fake"
    if engine == "sglang":
        if not all(_package(name, needed=True).ok for name in OPTIONAL):
            return Finding(name, False, "not tried: packages are missing")
        from ..launching.tiny_model import tiny_model

        model = str(tiny_model())
    try:
        async with launch(
            model, device="cpu", engine=engine, progress=can_redraw(sys.stderr)
        ) as client:
            ready = time.perf_counter()
            completion = await client.generate(
                input_ids=[1, 2, 3], max_new_tokens=1, logprobs=True, timeout=60
            )
    except SglrlError as error:
        return Finding(name, False, str(error))
    started, total = ready - begun, completion.timing.total
    detail = f"worker up in {started:.1f} s, answer in {total * 1000:.1f} ms"
    if engine == "fake" and find_spec("sglang") is not None:
        detail += "; SGLang was not started, which --engine sglang does"
    return Finding(name, len(completion.output_ids) == 1, detail)


def table_of(findings: list[Finding]) -> Table:
    """Return the findings as a table for the terminal."""
    table = Table("", "", Column(overflow="fold"), show_header=False)
    for finding in findings:
        mark = "[green]ok[/]" if finding.ok else "[bold red]failed[/]"
        table.add_row(mark, finding.name, finding.detail.replace("[", r"\["))
    return table
