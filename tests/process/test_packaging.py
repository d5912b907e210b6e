"""What an installation has that a folder of sources has not."""

from __future__ import annotations

import ast
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import sglrl
from sglrl import _compiled

LOOK = """
import sys, sglrl._compiled, sglrl.core.rollouts, sglrl.relay, sglrl.remote_driver, sglrl.requests
import sglrl.rollout.state
print(*(sys.modules["sglrl." + name].__file__ for name in sglrl._compiled.MODULES))
"""


def test_the_compiled_part_is_there_where_a_compiler_is() -> None:
    if os.environ.get("SGLRL_COMPILED") == "0":
        pytest.skip("it was left out on request")
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    compiled = importlib.util.find_spec("sglrl._ids") is not None and not _compiled.why_not
    assert compiled or shutil.which(compiler) is None


@pytest.mark.parametrize("path", _compiled.SOURCES.values(), ids=_compiled.MODULES)
def test_what_is_compiled_is_nothing_that_mypyc_makes_otherwise(path: str) -> None:
    """A coroutine of mypyc's hands on exceptions in a way that Python 3.12 warns of; options of a
    class, as a msgspec struct has, it forgets; and exceptions have no ``__dict__`` there."""
    for node in ast.walk(ast.parse(Path(path).read_text())):
        assert not isinstance(node, ast.AsyncFunctionDef), f"{node.name} is a coroutine"
        if isinstance(node, ast.ClassDef):
            assert not node.keywords, f"{node.name} has options"
            assert not any("Error" in ast.dump(base) for base in node.bases), node.name


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The package as it is installed, in a folder that may be changed."""
    if _compiled.why_not:
        pytest.skip(f"there is nothing compiled: {_compiled.why_not}")
    package = Path(sglrl.__file__).parent
    library = importlib.util.find_spec(f"{_compiled.group_name()}__mypyc")
    assert library is not None
    assert library.origin is not None
    shutil.copytree(package, tmp_path / "sglrl", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(library.origin, tmp_path)
    return tmp_path


def modules_of(folder: Path, wish: str = "") -> set[str]:
    """How the files end of which a process has the modules that can be compiled."""
    # Not where the tests are: the current folder comes before all others.
    done = subprocess.run(
        [sys.executable, "-c", LOOK],
        cwd=folder,
        env={**os.environ, "SGLRL_COMPILED": wish},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    files = [Path(name) for name in done.stdout.split()]
    assert len(files) == len(_compiled.MODULES)
    assert all(folder in file.parents for file in files)
    return {file.suffix for file in files}


def test_what_was_compiled_is_used_until_its_source_is_edited(copy: Path) -> None:
    assert modules_of(copy) == modules_of(copy, "1") == {".so"}
    assert modules_of(copy, "0") == {".py"}
    routing = copy / "sglrl" / "core" / "routing.py"
    source = routing.read_text()
    routing.write_text(source + "\nEDITED = True\n")
    # Left from when it was compiled, too.
    left = copy / "sglrl" / f"config{sysconfig.get_config_var('EXT_SUFFIX')}"
    left.touch()
    # All of them: what is compiled does not take the objects of what is not.
    assert modules_of(copy) == {".py"}
    with pytest.raises(AssertionError, match="SGLRL_COMPILED is 1, but the source was edited"):
        modules_of(copy, "1")
    left.unlink()
    routing.write_text(source)
    assert modules_of(copy) == {".so"}


def test_a_part_of_what_was_compiled_is_not_used(copy: Path) -> None:
    for path in copy.glob("sglrl/driver.*.so"):
        path.unlink()
    assert modules_of(copy) == {".py"}
    with pytest.raises(AssertionError, match="SGLRL_COMPILED is 1, but not compiled"):
        modules_of(copy, "1")


def hint_of(folder: Path) -> str:
    """How the package in ``folder`` tells to install an extra."""
    done = subprocess.run(
        [sys.executable, "-c", "from sglrl.config import install; print(install('sglang'))"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), "SGLRL_COMPILED": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_how_an_extra_is_installed(tmp_path: Path) -> None:
    package = Path(sglrl.__file__).parent
    shutil.copytree(package, tmp_path / "sglrl", ignore=shutil.ignore_patterns("__pycache__"))
    assert hint_of(tmp_path) == "pip install 'sglrl[sglang]'"
    # A clone, or an editable installation of one.
    (tmp_path / "pyproject.toml").touch()
    assert hint_of(tmp_path) == f"pip install -e '.[sglang]' in {tmp_path}"
