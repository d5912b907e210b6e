"""The output of every bench: the machine, one table, the targets and one JSON file."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from .parts import Note

console = Console(width=None if Console().is_terminal else 120)
_errors = Console(stderr=True)


class Target(NamedTuple):
    """A target for a figure. ``measured`` is None if the figure could not be measured."""

    name: str
    asked: float
    measured: float | None
    unit: str
    at_most: bool = False

    @property
    def verdict(self) -> str:
        if self.measured is None:
            return "not measured"
        met = self.measured <= self.asked if self.at_most else self.measured >= self.asked
        return "ok" if met else "short"


def machine() -> dict[str, Any]:
    """Return CPU model, cores, GPUs and versions. A figure means nothing without them."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / (1 << 30)),
        "gpus": _gpus(),
        "python": platform.python_version(),
        "load_average_before": round(os.getloadavg()[0], 2),
        "versions": {
            name: version
            for name in (
                "sglrl",
                "sglang",
                "torch",
                "pyzmq",
                "msgspec",
                "uvloop",
                "aiohttp",
                "uvicorn",
                "httptools",
                "ray",
                "torchmonarch",
            )
            if (version := _version(name))
        },
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _gpus() -> list[str]:
    """Return the names of the NVIDIA GPUs, read without a CUDA library."""
    found: list[str] = []
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        lines = path.read_text(encoding="utf-8").splitlines()
        found += [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]
    return found


def describe(info: dict[str, Any]) -> str:
    gpus = f", {len(info['gpus'])} x {info['gpus'][0]}" if info["gpus"] else ""
    versions = ", ".join(f"{name} {version}" for name, version in info["versions"].items())
    return (
        f"{info['cores']} cores of {info['cpu']}{gpus}, {info['memory_gib']} GiB; "
        f"load {info['load_average_before']} before; Python {info['python']}, {versions}"
    )


@contextmanager
def steps(total: int) -> Iterator[tuple[Note, Note]]:
    """Show a progress bar over the parts on stderr. Without a terminal, print lines.

    Yields:
        ``begin`` and ``note``: ``begin(text)`` starts the next part, ``note(text)`` shows what the
        part is doing.
    """
    if not _errors.is_terminal:
        yield (lambda text: print_note(text), lambda text: print_note("  " + text))
        return
    columns = (SpinnerColumn(), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=_errors, transient=True) as progress:
        task = progress.add_task("", total=total)
        current = ""
        begun = 0

        def begin(text: str) -> None:
            nonlocal current, begun
            current = text
            progress.update(task, description=text, completed=begun)
            begun += 1

        yield begin, lambda text: progress.update(task, description=f"{current}: {text}")


def print_note(text: str) -> None:
    _errors.print(text, markup=False, highlight=False)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table. The first column is left-aligned, the others are right-aligned."""
    drawn = Table(title=title, title_justify="left", title_style="bold")
    for i, column in enumerate(columns):
        drawn.add_column(column, justify="right" if i else "left")
    for row in rows:
        drawn.add_row(*row)
    console.print(drawn)


def print_targets(targets: Sequence[Target]) -> None:
    rows = []
    for target in targets:
        sign = "<=" if target.at_most else ">="
        style = {"ok": "green", "short": "red"}.get(target.verdict, "yellow")
        measured = "" if target.measured is None else number(target.measured)
        rows.append(
            (
                target.name,
                f"{sign} {number(target.asked)} {target.unit}",
                measured,
                f"[{style}]{target.verdict}[/]",
            )
        )
    table("asked", ("figure", "asked", "measured", ""), rows)


def number(value: float | None) -> str:
    """Format a number with at most four significant digits, or with thousands separators.

    None becomes an empty string.
    """
    if value is None:
        return ""
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def write_json(path: Path | None, document: dict[str, Any], targets: Sequence[Target]) -> None:
    if path is None:
        return
    asked = [t._asdict() | {"verdict": t.verdict} for t in targets]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document | {"asked": asked}, indent=2) + "\n", encoding="utf-8")
    print_note(f"written to {path}")
