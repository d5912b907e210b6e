"""Explain in a few lines why a model could not be fetched from the hub.

The traceback through the libraries that tried would be long.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


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


def unfetched(model: str, error: BaseException) -> str | None:
    """Return an explanation for the user, or None if the hub did not cause ``error``."""
    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) and cause not in causes:
        causes.append(cause)
    of_hub = any(type(cause).__module__.startswith("huggingface_hub") for cause in causes)
    if os.path.isdir(model) or not of_hub:
        return None
    # Libraries repeat the message of the error that caused theirs: show each message once.
    said: dict[str, str] = {}
    for cause in causes:
        said.setdefault(str(cause).strip().partition("\n")[0], type(cause).__name__)
    return "\n".join(
        [
            f"{model!r} could not be fetched from the hub:",
            *(f"  {name}: {line}" for line, name in said.items()),
            "Check its name and the network (a proxy is HTTPS_PROXY, a gated model needs "
            "HF_TOKEN), or give launch a folder that holds the model.",
        ]
    )
