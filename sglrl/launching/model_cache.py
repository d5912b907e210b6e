"""Keep the models that this machine makes in the cache folder."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from ..config import cache_dir
from ..errors import UsageError


def made_once(name: str, make: Callable[[Path], object]) -> Path:
    """Return the folder ``name`` of the cache. If it is not there, make it.

    Several processes may make the same folder at the same time. Each of them works in a folder of
    its own, and the first that finishes renames it, so the cache never has a part of a model.

    Args:
        name: the name of the folder.
        make: writes a model into the empty folder that it gets.

    Raises:
        UsageError: the cache folder cannot be written.
    """
    folder = cache_dir() / name
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".making-", dir=folder.parent))
    except OSError as error:
        raise UsageError(
            f"{folder.parent} cannot be written ({error.strerror}); set SGLRL_CACHE to a folder "
            "for models that are made here"
        ) from None
    try:
        make(scratch)
        os.replace(scratch, folder)
    except OSError:
        # Another process may have made the same model meanwhile.
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder
