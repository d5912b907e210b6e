"""Find and examine the interpreter of the workers that ``launch(python=...)`` names."""

from __future__ import annotations

import os
import shutil
import subprocess

import msgspec

from ..config import LOCAL_MODELS, __version__, install
from ..errors import UsageError
from ..transport.system_limits import reason
from ..wire.processes import Environment

_SECONDS = 60.0
"""Seconds that a run of the interpreter may take. On an idle machine, a run takes 0.2 s."""


def find_python(python: str | os.PathLike[str]) -> str:
    """Return the absolute path of an interpreter. ``python`` is its path or its name.

    Symbolic links are not resolved, because Python finds its virtual environment by the path of the
    link.

    Raises:
        UsageError: there is no such program.
    """
    if not isinstance(python, (str, os.PathLike)) or not isinstance(os.fspath(python), str):
        raise UsageError(f"python must be the path of an interpreter, got {python!r}")
    path = shutil.which(os.path.expanduser(python))
    if path is None:
        raise UsageError(f"python={os.fspath(python)!r} is not a program")
    return os.path.abspath(path)


def examine(python: str, *, needs_sglang: bool) -> Environment:
    """Ask an interpreter for its packages, and check that it can run workers of this driver.

    Raises:
        UsageError: the interpreter cannot run, lacks a package, or has another version of sglrl.
    """
    wanted = f"{python} -m {install('sglang')}"
    try:
        done = _run(python, "-m", "sglrl.driver.environment")
        environment = msgspec.json.decode(done.stdout, type=Environment)
    except msgspec.DecodeError:
        *_, last = ["no reason given", *done.stderr.strip().splitlines()]
        if "No module named" in last and "sglrl" in last:
            raise UsageError(f"python={python!r} has no sglrl: {wanted}") from None
        raise UsageError(f"python={python!r} cannot import sglrl: {last}") from None
    if environment.sglrl != __version__:
        raise UsageError(
            f"python={python!r} has sglrl {environment.sglrl} and this program has {__version__}; "
            "install the same version on both sides"
        )
    if needs_sglang and not environment.sglang:
        raise UsageError(f"python={python!r} has no SGLang: {wanted}")
    return environment


def make_local_model(python: str, model: str) -> str:
    """Make a model with an interpreter that has torch and transformers, and return its folder.

    Args:
        python: the path of the interpreter.
        model: one of ``LOCAL_MODELS``.

    Raises:
        UsageError: the interpreter could not make the model.
    """
    done = _run(python, "-m", "sglrl.launching.local_models", model, seconds=LOCAL_MODELS[model])
    if done.returncode:
        *_, last = ["no reason given", *done.stderr.strip().splitlines()]
        raise UsageError(f"python={python!r} could not make the model {model!r}: {last}")
    return done.stdout.strip().splitlines()[-1]


def _run(
    python: str, *arguments: str, seconds: float = _SECONDS
) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            [python, *arguments],
            capture_output=True,
            encoding="utf-8",
            errors="surrogateescape",
            # In the current folder, a file could hide an installed package of the same name.
            cwd="/",
            stdin=subprocess.DEVNULL,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        raise UsageError(f"python={python!r} did not end within {seconds:g} s") from None
    except OSError as error:
        raise UsageError(f"python={python!r} cannot be run: {reason(error)}") from None
