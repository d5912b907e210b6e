"""Options that several commands share, and their checks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from ..errors import UsageError

Replicas = Annotated[int, typer.Option(min=1, help="Copies of the model, one worker each.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, or auto: cuda where there is one.")]
Engine = Annotated[str, typer.Option(help="sglang, or fake: repeats the prompt, needs no torch.")]
TpSize = Annotated[int, typer.Option(min=1, help="GPUs per copy of the model.")]
Model = Annotated[str, typer.Argument(help="Folder or hub name; 'tiny' for a random model.")]
Json = Annotated[Path | None, typer.Option(metavar="FILE", help="Also write the result there.")]


def check_target(option: str, file: Path | None, *, makes_folder: bool = False) -> None:
    """Raise ``UsageError`` if the file cannot be written. Called before the run starts."""
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
