"""``import sglrl`` is cheap, and every public name can be had from it."""

from __future__ import annotations

import subprocess
import sys

import pytest

import sglrl


@pytest.mark.parametrize("name", sglrl.__all__)
def test_each_public_name(name: str) -> None:
    code = (
        f"import sglrl; value = sglrl.{name}; assert callable(value), value; print(value.__name__)"
    )
    assert getattr(sglrl, name).__name__ == name
    if name == "rollout":
        # A module of the same name must not take the function's place, whatever came first.
        for first in ("", f"import sglrl.{name}; "):
            done = subprocess.run(
                [sys.executable, "-c", first + code], capture_output=True, text=True, timeout=60
            )
            assert done.stdout.strip() == name, done.stderr


def test_importing_sglrl_imports_nothing_else() -> None:
    code = (
        "import sys, sglrl; print(*sorted({'numpy', 'msgspec', 'zmq', 'asyncio'} & {*sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout.split(), done.stderr) == ([], "")
