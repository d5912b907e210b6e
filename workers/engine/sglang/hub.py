"""A model that cannot be fetched from the hub: said in a few lines, not in a traceback through the
libraries that tried."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def explained(model: str) -> Iterator[None]:
    """End the process with an explanation, its last output, if ``model`` is a name on the hub and
    something of it could not be had from there. Other errors go on as they are."""
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
    """What to tell the user, or None if it is not the hub that ``error`` comes from."""
    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) and cause not in causes:
        causes.append(cause)
    of_hub = any(type(cause).__module__.startswith("huggingface_hub") for cause in causes)
    if os.path.isdir(model) or not of_hub:
        return None
    # What one library says for another is said once.
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
