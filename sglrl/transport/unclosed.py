"""Warn about objects that own processes or connections and that the program never closes."""

from __future__ import annotations

import os
import warnings
import weakref
from typing import Any


def warn_unless_closed(owner: object, name: str) -> weakref.finalize[..., Any]:
    """Emit a ``ResourceWarning`` if ``owner`` is never closed.

    The warning is emitted when ``owner`` is garbage-collected, or when the interpreter exits while
    ``owner`` exists. When ``owner`` is closed, it must call ``detach()`` of the returned object.

    Args:
        owner: the object that must be closed.
        name: the name of ``owner`` in the warning. It must not contain a secret.
    """
    return weakref.finalize(owner, _warn, name, os.getpid())


def _warn(name: str, pid: int) -> None:
    # A forked process has a copy of ``owner``. The parent closes the original.
    if os.getpid() == pid:
        warnings.warn(
            f"{name} was never closed; use it in an 'async with' block ('with' for "
            "sglrl.blocking), or call its close()",
            ResourceWarning,
            stacklevel=1,
        )
