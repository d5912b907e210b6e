"""Write a file so that no reader ever finds a part of it."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def new_content(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Return a file whose content replaces that of ``path`` when the block ends.

    The content is written under a temporary name in the same folder. It is renamed when all of it
    is on disk. If the block raises, or the process is killed, ``path`` keeps its old content.

    Raises:
        OSError: the folder is not writable. ``path`` is unchanged.
    """
    path = Path(path)
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(unfinished, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
