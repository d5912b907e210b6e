"""How to install an extra. (tox's environment ``wheel`` installs the package itself.)"""

from __future__ import annotations

import os
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
