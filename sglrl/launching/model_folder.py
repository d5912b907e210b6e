"""Check the folder of a model before a worker starts."""

from __future__ import annotations

import glob
from pathlib import Path

import msgspec

from ..errors import ModelError
from ..inference.tokens import is_hub_name
from ..wire.codec import malformed


def check_model(model: str) -> str:
    """Return the absolute path of a model folder, or a hub name unchanged.

    Raises:
        ModelError: the folder does not exist, or its config.json cannot be used.
    """
    folder = Path(model).expanduser()
    if not folder.exists():
        if not is_hub_name(model):
            raise ModelError(
                f"there is no model at {model!r}; give a folder, or 'owner/name' on the hub"
            )
        return model
    config = folder / "config.json"
    if not config.is_file():
        raise ModelError(f"{folder} holds no config.json, so it is not a model folder")
    try:
        content = config.read_bytes()
        parsed = msgspec.json.decode(content)
    except OSError as error:
        raise ModelError(f"{config} cannot be read: {error}") from None
    except msgspec.DecodeError as error:
        raise ModelError(f"{config} is not JSON: {malformed(error, content)}") from None
    if not isinstance(parsed, dict) or not parsed.get("architectures"):
        raise ModelError(f"{config} names no 'architectures', so SGLang cannot load it")
    path = str(folder.resolve())
    if glob.escape(path) != path:
        raise ModelError(f"SGLang finds no weights in {path!r}: it holds one of * ? [; rename it")
    return path


def own_dtype(model: str) -> str | None:
    """Return the dtype in which a local model was saved, or None if it is not known.

    SGLang's own "auto" converts float32 to float16, which changes the logprobs.
    """
    config = Path(model, "config.json")
    if not config.is_file():
        return None
    parsed = msgspec.json.decode(config.read_bytes())
    dtype = parsed.get("dtype") or parsed.get("torch_dtype")
    return dtype if isinstance(dtype, str) else None
