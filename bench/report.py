"""The report of a bench: the machine, the tables, the targets and the file of ``--json``."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Collection, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import msgspec
import psutil
import typer
from rich.console import Console
from rich.table import Table

from .parts import Note, Part, PartFailed, run_part

console = Console(width=None if Console().is_terminal else 120)
_errors = Console(stderr=True)
_PACKAGES = "sglrl sglang torch pyzmq msgspec uvloop aiohttp uvicorn httptools ray torchmonarch"

Json = Annotated[Path | None, typer.Option(help="Write all figures to this file.")]
"""The option ``--json`` of every bench."""
Value = str | float | None
"""The value of a table's cell. Numbers are formatted by the function ``number``."""


class Target(msgspec.Struct):
    """A target for a figure. ``measured`` is None if the figure could not be measured."""

    name: str
    asked: float
    measured: float | None
    unit: str
    at_most: bool
    verdict: str


class Report:
    """The results of one run of a bench. They are printed, and written to the file of ``--json``.

    Args:
        bench: the name of the bench.
        path: the file of ``--json``.

    Attributes:
        machine: CPU model, cores, GPUs and versions. A figure means nothing without them.
        failed: for each system that could not be measured, the reason.
        targets: the figures that have a target, with their targets.
    """

    def __init__(self, bench: str, path: Path | None) -> None:
        self.bench = bench
        self.path = path
        self.machine = _machine()
        self.failed: dict[str, str] = {}
        self.targets: list[Target] = []
        console.print(_described(self.machine), markup=False)

    def measure(
        self,
        plan: Mapping[str, Part],
        *,
        limit: float = 600.0,
        env: Mapping[str, str] | None = None,
        of: str = "",
    ) -> dict[str, Any]:
        """Measure systems one after the other, each in its own process.

        Args:
            plan: the systems by title.
            limit: seconds that one system may take, including its start.
            env: environment variables in addition to the bench's own.
            of: a prefix for the titles in messages and in ``failed``. The titles of the result do
                not have it.

        Returns:
            The figures by title. Systems that fail are left out.
        """
        results = {}
        for title, part in plan.items():
            title = of + title
            print_note(title)
            with _errors.status(title) as status:

                def note(text: str, show: Note = status.update, title: str = title) -> None:
                    show(f"{title}: {text}") if _errors.is_terminal else print_note("  " + text)

                try:
                    results[title.removeprefix(of)] = run_part(part, note, limit, env)
                except PartFailed as failure:
                    self.failed[title] = str(failure)
                    print_note(f"{title} failed: {failure}\n{failure.log}")
        return results

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[Value]]) -> None:
        """Print a table. The first column is left-aligned, the others are right-aligned."""
        drawn = Table(title=title, title_justify="left", title_style="bold")
        for i, column in enumerate(columns):
            drawn.add_column(column, justify="right" if i else "left")
        for row in rows:
            drawn.add_row(*(v if isinstance(v, str) else number(v) for v in row))
        if rows:
            console.print(drawn)

    def lines(self, *texts: str) -> None:
        """Print plain lines."""
        for text in texts:
            console.print(text, markup=False)

    def target(
        self, name: str, asked: float, measured: float | None, unit: str = "", at_most: bool = False
    ) -> None:
        """Compare a figure with its target."""
        if measured is None:
            verdict = "not measured"
        else:
            verdict = "ok" if (measured <= asked if at_most else measured >= asked) else "short"
        self.targets.append(Target(name, asked, measured, unit, at_most, verdict))

    def finish(self, *, may_fail: Collection[str] = (), ok: bool = True, **figures: Any) -> None:
        """Print the failures and the targets, and write the file.

        Args:
            may_fail: the titles of systems that may fail without failing the bench.
            ok: False if the bench found its figures to be wrong. A missed target does not count.
            **figures: the contents of the file besides the machine, the failures and the targets.

        Raises:
            typer.Exit: with status 1, if the bench failed.
        """
        self.lines(*(f"{title}: not measured: {why}" for title, why in self.failed.items()))
        styles = {"ok": "green", "short": "red", "not measured": "yellow"}
        self.table(
            "asked",
            ("figure", "asked", "measured", ""),
            [
                (
                    target.name,
                    f"{'<=' if target.at_most else '>='} {number(target.asked)} {target.unit}",
                    target.measured,
                    f"[{styles[target.verdict]}]{target.verdict}[/]",
                )
                for target in self.targets
            ],
        )
        if self.path is not None:
            document = {"bench": self.bench, "machine": self.machine, **figures}
            document |= {"failed": self.failed, "asked": msgspec.to_builtins(self.targets)}
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
            print_note(f"written to {self.path}")
        if not ok or self.failed.keys() - set(may_fail):
            raise typer.Exit(1)


def ratio(a: float | None, b: float | None) -> float | None:
    """Return a / b, or None if one of them was not measured or b is 0."""
    return a / b if a is not None and b else None


def extent(values: Sequence[float]) -> str:
    """Return the lowest and the highest value as text."""
    return f"{number(min(values))} .. {number(max(values))}"


def number(value: float | None) -> str:
    """Return a number as text, or "" for None.

    Numbers below 1,000 have up to four significant digits. Larger numbers have no decimals.
    """
    if value is None:
        return ""
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def print_note(text: str) -> None:
    _errors.print(text, markup=False, highlight=False)


def _machine() -> dict[str, Any]:
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / (1 << 30)),
        "gpus": _gpus(),
        "python": platform.python_version(),
        "load_average_before": round(os.getloadavg()[0], 2),
        "versions": {name: version for name in _PACKAGES.split() if (version := _version(name))},
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
    """Return the names of the NVIDIA GPUs. No CUDA library is used."""
    names: list[str] = []
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        lines = path.read_text(encoding="utf-8").splitlines()
        names += [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]
    return names


def _described(info: Mapping[str, Any]) -> str:
    gpus = f", {len(info['gpus'])} x {info['gpus'][0]}" if info["gpus"] else ""
    versions = ", ".join(f"{name} {version}" for name, version in info["versions"].items())
    return (
        f"{info['cores']} cores of {info['cpu']}{gpus}, {info['memory_gib']} GiB; "
        f"load {info['load_average_before']} before; Python {info['python']}, {versions}"
    )
