"""Make temporary folders that a later program removes if this program is killed.

The owner of a folder holds a lock on a file in it. The kernel releases the lock when the owner
exits for any reason, so a folder whose lock is free has no owner. Whenever a program makes a
folder, it also removes the folders without an owner.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

PREFIX: Final = "sglrl-"
_LOCK: Final = "lock"
_locks: dict[Path, int] = {}
"""The open lock files of this process's folders."""


def make_folder(kind: str = "", base: str | None = None) -> Path:
    """Make a folder that only this user can access, and remove the folders of killed programs.

    Args:
        kind: part of the folder's name.
        base: the parent folder. None: the system's folder for temporary files.

    Raises:
        OSError: the folder cannot be made.
    """
    base = base or tempfile.gettempdir()
    _sweep(base)
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{kind}", dir=base))
        if _lock(folder, os.O_CREAT):
            return folder
        # Another process took the folder for one without an owner, and removes it. Try again.


def remove_folder(folder: Path, owner: int) -> None:
    """Remove a folder, unless this process is only a fork of the owner.

    Args:
        folder: the folder to remove.
        owner: the id of the process that made the folder.
    """
    if os.getpid() != owner:
        return
    shutil.rmtree(folder, ignore_errors=True)
    lock = _locks.pop(folder, None)
    if lock is not None:
        os.close(lock)


def _sweep(base: str) -> None:
    """Remove the folders in ``base`` whose lock no process holds."""
    with contextlib.suppress(OSError), os.scandir(base) as entries:
        folders = [
            Path(entry.path)
            for entry in entries
            if entry.name.startswith(PREFIX)
            and entry.is_dir(follow_symlinks=False)
            and entry.stat(follow_symlinks=False).st_uid == os.getuid()
        ]
        for folder in folders:
            if folder not in _locks and _lock(folder, 0):
                remove_folder(folder, os.getpid())


def _lock(folder: Path, create: int) -> bool:
    """Lock a folder. Return False if another process holds its lock, or removes the folder.

    If the file system has no locks, a new folder stays without a lock and is never swept.
    """
    path = folder / _LOCK
    try:
        lock = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | create, 0o600)
    except OSError:
        if create and folder.exists():
            raise
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # If the file was removed between ``open`` and ``flock``, the lock has no effect.
        if os.path.samestat(os.fstat(lock), os.stat(path)):
            _locks[folder] = lock
            return True
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError:
        os.close(lock)
        return bool(create)
    os.close(lock)
    return False
