"""Which package may import which, read from the source; and what an import of the core loads."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import sglrl

ROOT = Path(__file__).parents[2]
LIBRARY = sorted((ROOT / "sglrl").rglob("*.py"))
CORE = sorted((ROOT / "sglrl" / "core").rglob("*.py"))
WORKERS = sorted((ROOT / "workers").rglob("*.py"))

IMPURE = {
    "asyncio",
    "datetime",
    "logging",
    "multiprocessing",
    "os",
    "random",
    "secrets",
    "selectors",
    "socket",
    "subprocess",
    "threading",
    "time",
    "torch",
    "uuid",
    "uvloop",
    "zmq",
}


def modules(path: Path) -> Iterator[str]:
    """Yield the absolute names of all modules that a file imports anywhere."""
    package = [*path.relative_to(ROOT).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            yield ".".join([*base, *([node.module] if node.module else [])])


def tops(path: Path) -> set[str]:
    return {name.partition(".")[0] for name in modules(path)}


def relative(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


def test_the_files_are_found() -> None:
    assert len(CORE) >= 5
    assert len(LIBRARY) > 20
    assert len(WORKERS) > 10


@pytest.mark.parametrize("path", CORE, ids=relative(CORE))
def test_the_core_has_no_clock_no_chance_and_no_io(path: Path) -> None:
    assert not tops(path) & IMPURE
    for name in modules(path):
        if name.startswith("sglrl"):
            assert name.startswith(("sglrl.core", "sglrl.config", "sglrl.errors", "sglrl.wire")), (
                f"{path.name} imports {name}"
            )


@pytest.mark.parametrize("path", LIBRARY, ids=relative(LIBRARY))
def test_the_library_never_imports_the_workers(path: Path) -> None:
    assert not tops(path) & {"sglrl_workers", "workers"}


def test_zmq_is_imported_in_one_folder() -> None:
    users = [path for path in [*LIBRARY, *WORKERS] if "zmq" in tops(path)]
    assert users
    for path in users:
        assert path.is_relative_to(ROOT / "sglrl" / "transport" / "zmq"), path


def test_sglang_is_imported_in_one_folder() -> None:
    users = [path for path in [*LIBRARY, *WORKERS] if "sglang" in tops(path)]
    assert users
    for path in users:
        assert path.is_relative_to(ROOT / "workers" / "engine" / "sglang"), path


def test_opentelemetry_is_imported_in_one_module() -> None:
    users = [path for path in [*LIBRARY, *WORKERS] if "opentelemetry" in tops(path)]
    assert users == [ROOT / "sglrl" / "tracing.py"]


def test_importing_the_core_brings_nothing_heavy() -> None:
    code = """
import sys
from importlib import import_module

for name in sys.argv[1:]:
    import_module(name)
heavy = {"zmq", "torch", "asyncio", "uvloop", "sglang", "transformers", "cloudpickle", "rich"}
print(*sorted(heavy & set(sys.modules)))
"""
    names = [".".join(p.relative_to(ROOT).with_suffix("").parts) for p in CORE]
    names = [name.removesuffix(".__init__") for name in names]
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            code,
            *names,
            "sglrl.wire.codec",
            "sglrl.inference.sampling",
            "sglrl.inference.completion",
        ],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
        timeout=60,
    )
    assert done.stdout.split() == []


def test_public_names_equal_all() -> None:
    assert sglrl.__all__ == sorted(sglrl.__all__, key=lambda n: (n[0].islower(), n))
    assert len(set(sglrl.__all__)) == len(sglrl.__all__)
    # "from sglrl import *" imports no names of this form.
    assert set(sglrl._HOME) - {"__version__"} == set(sglrl.__all__)
    assert set(sglrl.__all__) <= set(dir(sglrl))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = sglrl.nothing  # type: ignore[attr-defined]


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse((ROOT / "sglrl" / "__init__.py").read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {
        alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    assert seen == sglrl._HOME


@pytest.mark.parametrize("name", sglrl.__all__)
def test_each_public_name_is_defined_where_it_says(name: str) -> None:
    home = ROOT.joinpath("sglrl", *sglrl._HOME[name].split("."))
    if home.is_dir():
        # Find the module of the package from which its ``__init__`` imports the name.
        face = ast.parse((home / "__init__.py").read_text())
        (home,) = (
            home / str(node.module)
            for node in face.body
            if isinstance(node, ast.ImportFrom) and name in [alias.name for alias in node.names]
        )
    tree = ast.parse(home.with_suffix(".py").read_text())
    defined = {
        node.name
        for node in tree.body
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
    }
    assert name in defined
