"""Explain in a few lines why an engine could not start, instead of with a long traceback."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from sglrl.errors import UsageError
from sglrl.hub_errors import unfetched


@contextmanager
def explained(model: str) -> Iterator[None]:
    """Exit with an explanation if the hub or the user's arguments keep the engine from starting.

    The explanation is the last output of the process. Other errors propagate unchanged.
    """
    try:
        yield
    except Exception as error:
        text = error.message if isinstance(error, UsageError) else unfetched(model, error)
        if text is None:
            raise
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
        os._exit(1)
