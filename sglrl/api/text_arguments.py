"""Checks of engine arguments that SGLang declares as plain text.

SGLang reads these in the worker, where a wrong value has no effect or fails late.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from ..errors import UsageError
from ..inference.tokens import is_hub_name

_LEVELS: Final = ("debug", "info", "warning", "error", "critical")
_TORCHAO: Final = ("int8wo", "int8dq", "fp8wo", "fp8dq-per_row", "fp8dq-per_tensor")
_CHOICES: Final = {
    "kv_canary_real_data": ("none", "partial", "all"),
    "log_level": (*_LEVELS, *map(str.upper, _LEVELS)),
    "model_config_parser": ("auto", "hf", "mistral"),
    "model_impl": ("auto", "sglang", "transformers", "mindspore"),
    "modelopt_quant": ("fp8", "int4_awq", "w4a8_awq", "nvfp4", "nvfp4_awq"),
    "sampling_backend": ("flashinfer", "pytorch", "ascend", "intel_xpu"),
    "torchao_config": ("", *_TORCHAO, *(f"int4wo-{size}" for size in (32, 64, 128, 256))),
}
"""Values that the sources of SGLang 0.5.17 to 0.5.23 compare these with."""

JSON_TEXTS: Final = ("json_model_override_args", "model_loader_extra_config")
"""Arguments that SGLang takes as JSON text. ``launch`` also takes them as a dict."""


def _is_file(value: str) -> bool:
    return Path(value).is_file()


def _is_object(value: str) -> bool:
    try:
        return isinstance(msgspec.json.decode(value), dict)
    except msgspec.DecodeError:
        return False


_Check = tuple[str, Callable[[str], bool]]
_FILE: Final[_Check] = ("an existing file", _is_file)
_OBJECT: Final[_Check] = ("a JSON object", _is_object)
_CHECKS: Final[Mapping[str, _Check]] = {
    "decrypted_config_file": _FILE,
    "msprobe_dump_config": _FILE,
    "quantization_param_path": _FILE,
    "rl_quant_profile": _FILE,
    **dict.fromkeys(JSON_TEXTS, _OBJECT),
    "deepep_config": (
        "a JSON object or an existing file",
        lambda value: _is_object(value) or _is_file(value),
    ),
    "model_checksum": (
        "'', an existing file, or 'owner/name' on the hub",
        lambda value: not value or _is_file(value) or is_hub_name(value),
    ),
    "tokenizer_path": (
        "an existing folder, or 'owner/name' on the hub",
        lambda value: Path(value).is_dir() or is_hub_name(value),
    ),
}


def json_text(name: str, value: dict[Any, Any]) -> str:
    """Return a dict as JSON text.

    Raises:
        UsageError: it holds other values than those of JSON.
    """
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, ValueError, RecursionError, UnicodeError) as error:
        raise UsageError(f"{name} must be a dict of JSON values: {error}") from None


def check_text(name: str, value: Any) -> None:
    """Check the value of an argument, if it is text.

    Raises:
        UsageError: SGLang cannot use it.
    """
    if not isinstance(value, str):
        return
    choices = _CHOICES.get(name)
    if choices is not None and value not in choices:
        raise UsageError(
            f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r:.200}"
        )
    wanted, fits = _CHECKS.get(name, ("", None))
    if fits is not None and not fits(value):
        raise UsageError(f"{name} must be {wanted}, got {value!r:.200}")
