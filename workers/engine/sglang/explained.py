"""Explain in a few lines why an engine could not start, instead of with a long traceback."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from sglrl.errors import SglrlError
from sglrl.inference.hub_errors import unfetched


@contextmanager
def explained(model: str) -> Iterator[None]:
    """Exit with an explanation if the hub, or an error of ours, keeps the engine from starting.

    The explanation is the last output of the process. Other errors propagate unchanged.
    """
    try:
        yield
    except Exception as error:
        text = str(error) if isinstance(error, SglrlError) else unfetched(model, error)
        if text is None:
            raise
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
        os._exit(1)
