"""Explain in a few lines why a model could not be fetched from the Hugging Face hub."""

from __future__ import annotations

import os


def unfetched(model: str, error: BaseException) -> str | None:
    """Return an explanation for the user, or None if the hub did not cause ``error``."""
    if os.path.isdir(model):
        return None
    of_hub = any(type(cause).__module__.startswith("huggingface_hub") for cause in _causes(error))
    return explanation(model, error) if of_hub else None


def explanation(model: str, error: BaseException) -> str:
    """Return the messages of the error and its causes, each once, and advice for the user."""
    said: dict[str, str] = {}
    for cause in _causes(error):
        said.setdefault(str(cause).strip().partition("\n")[0], type(cause).__name__)
    return "\n".join(
        [
            f"{model!r} could not be fetched from the hub:",
            *(f"  {name}: {line}" for line, name in said.items()),
            "Check its name and the network (a proxy is HTTPS_PROXY, a gated model needs "
            "HF_TOKEN), or give launch a folder that holds the model. The models 'tiny' and "
            "'smollm2' need no hub.",
        ]
    )


def _causes(error: BaseException) -> list[BaseException]:
    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) and cause not in causes:
        causes.append(cause)
    return causes
