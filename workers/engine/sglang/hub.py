"""Explain in a few lines why a model could not be fetched from the hub.

The traceback through the libraries that tried would be long.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from sglrl.hub_errors import unfetched


@contextmanager
def explained(model: str) -> Iterator[None]:
    """Exit with an explanation if a file of ``model`` could not be fetched from the hub.

    The explanation is the last output of the process. Other errors propagate unchanged.
    """
    try:
        yield
    except Exception as error:
        text = unfetched(model, error)
        if text is None:
            raise
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
        os._exit(1)
