"""How to install an extra, and what tox runs. (Its environment ``wheel`` installs the package.)"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import sglrl


def hint_of(folder: Path) -> str:
    """Return the install command for an extra that the package in ``folder`` prints."""
    done = subprocess.run(
        [sys.executable, "-c", "from sglrl.config import install; print(install('sglang'))"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
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
    # A clone, or an editable install of a clone.
    (tmp_path / "pyproject.toml").touch()
    assert hint_of(tmp_path) == f"pip install -e '.[sglang]' in {tmp_path}"


def test_tox_names_the_files_of_tests_that_run_alone() -> None:
    root = Path(__file__).parents[2]
    (command,) = re.findall(
        r"pytest -m alone [^{]*\{posargs:(.*)\}", (root / "tox.ini").read_text()
    )
    # Written in two parts, because this file has no such test.
    mark = "pytest.mark." + "alone"
    files = [path for path in (root / "tests").rglob("test_*.py") if mark in path.read_text()]
    assert command.split() == sorted(str(path.relative_to(root)) for path in files)
