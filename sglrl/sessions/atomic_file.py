"""Write a file so that readers see either its old content or all of its new content."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def new_content(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Return a new file that replaces the file ``path`` when the block ends.

    The new content is written to a temporary file in the same folder. The file is renamed when its
    content is on disk. If the block raises, or the process is killed, ``path`` does not change.

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
