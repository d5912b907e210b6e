"""``import sglrl`` is cheap and provides every public name."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

import sglrl


@pytest.mark.parametrize("name", sglrl.__all__)
def test_each_public_name(name: str) -> None:
    value = getattr(sglrl, name)
    assert callable(value)
    assert value.__name__ == name
    # An imported module would replace a function of the same name.
    spec = importlib.util.find_spec(f"sglrl.{name}")
    # A folder without modules, left by an earlier version, is harmless.
    assert spec is None or spec.origin is None


def test_importing_sglrl_imports_nothing_else() -> None:
    code = (
        "import sys, sglrl; print(*sorted({'numpy', 'msgspec', 'zmq', 'asyncio'} & {*sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (done.stdout.split(), done.stderr) == ([], "")
