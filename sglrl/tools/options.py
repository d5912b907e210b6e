"""Declare the options that several commands share, and check their values."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import typer

from ..errors import UsageError

Replicas = Annotated[int, typer.Option(min=1, help="Copies of the model, one worker each.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, or auto: cuda if a GPU is visible.")]
Engine = Annotated[
    str, typer.Option(help="sglang, or fake: repeats the prompt and needs no torch.")
]
TpSize = Annotated[int, typer.Option(min=1, help="GPUs per copy of the model.")]
Model = Annotated[
    str,
    typer.Argument(
        help="A folder, a name on the Hugging Face hub, 'tiny' (random weights) or 'smollm2' "
        "(SmolLM2-135M-Instruct)."
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        show_default=False,
        help="Another argument of sglrl.launch or of SGLang, such as mem_fraction_static=0.8; "
        "may be repeated.",
    ),
]
Json = Annotated[
    Path | None, typer.Option(metavar="FILE", help="File to which the result is also written.")
]

_OF_PYTHON: Final = {"True": "true", "False": "false", "None": "null"}
_OPTIONS: Final = ("model", "replicas", "tp_size", "device", "engine")
"""The arguments of ``launch`` for which the commands have an option or argument of their own."""


def launch_arguments(given: list[str] | None) -> dict[str, Any]:
    """Return the arguments of ``launch`` that ``--set NAME=VALUE`` gives.

    A value may be JSON (``0.8``, ``true``, ``["a", "b"]``), or True, False or None. Any other value
    is a text.

    Raises:
        UsageError: a text is not NAME=VALUE, a name is given twice, or the command has its own
            option for a name.
    """
    arguments: dict[str, Any] = {}
    for text in given or ():
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise UsageError(f"--set is NAME=VALUE, such as mem_fraction_static=0.8, got {text!r}")
        if name in _OPTIONS:
            what = "an argument" if name == "model" else f"the option --{name.replace('_', '-')}"
            raise UsageError(f"--set {name}: give it as {what}")
        if name in arguments:
            raise UsageError(f"--set {name} is given twice")
        try:
            arguments[name] = msgspec.json.decode(_OF_PYTHON.get(value, value))
        except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
            arguments[name] = value
    return arguments


def check_target(option: str, file: Path | None, *, makes_folder: bool = False) -> None:
    """Raise ``UsageError`` if the file of an option cannot be written.

    Commands call this before the run starts, so that no result is lost.
    """
    if file is None:
        return
    file = file.absolute()
    folder = file.parent
    while makes_folder and not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir():
        raise UsageError(f"{option} {file}: there is no such folder")
    if file.is_dir():
        raise UsageError(f"{option} {file} is a folder; name a file")
    if not os.access(file if file.exists() else folder, os.W_OK):
        raise UsageError(f"{option} {file} cannot be written")
