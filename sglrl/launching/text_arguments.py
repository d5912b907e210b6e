"""Check engine arguments that SGLang declares as plain text.

SGLang reads them in the worker, where a wrong value has no effect or fails late.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from ..errors import UsageError
from ..inference.tokens import is_hub_name

_TORCHAO: Final = ("int8wo", "int8dq", "fp8wo", "fp8dq-per_row", "fp8dq-per_tensor")
_CHOICES: Final = {
    "kv_canary_real_data": ("none", "partial", "all"),
    "log_level": ("debug", "info", "warning", "warn", "error", "critical", "fatal"),
    "model_config_parser": ("auto", "hf", "mistral"),
    "model_impl": ("auto", "sglang", "transformers", "mindspore"),
    "modelopt_quant": ("fp8", "int4_awq", "w4a8_awq", "nvfp4", "nvfp4_awq"),
    "sampling_backend": ("flashinfer", "pytorch", "ascend", "intel_xpu"),
    "torchao_config": ("", *_TORCHAO, *(f"int4wo-{size}" for size in (32, 64, 128, 256))),
}
"""For each argument, the values that the sources of SGLang 0.5.17 to 0.5.23 know."""
_ANY_CASE: Final = ("kv_canary_real_data", "log_level")

JSON_TEXTS: Final = ("json_model_override_args", "model_loader_extra_config")
"""Arguments that SGLang takes as JSON text. ``launch`` also takes them as a dict."""
_FILES: Final = (
    "decrypted_config_file",
    "msprobe_dump_config",
    "quantization_param_path",
    "rl_quant_profile",
)


def json_text(name: str, value: dict[Any, Any]) -> str:
    """Return a dict as JSON text.

    Raises:
        UsageError: the dict contains a value that JSON does not have.
    """
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"{name} must be a dict of JSON values: {error}") from None


def check_text(name: str, value: Any) -> None:
    """Check the value of an argument, if it is text.

    Raises:
        UsageError: SGLang cannot use the value.
    """
    if not isinstance(value, str):
        return
    choices = _CHOICES.get(name)
    if choices is not None and (value.lower() if name in _ANY_CASE else value) not in choices:
        raise _wrong(name, f"one of {', '.join(map(repr, choices))}", value)
    if name in JSON_TEXTS and not _is_object(value):
        raise _wrong(name, "a JSON object", value)
    if name == "tokenizer_path" and not (Path(value).is_dir() or is_hub_name(value)):
        raise _wrong(name, "an existing folder, or 'owner/name' on the hub", value)


def check_files(args: Mapping[str, Any]) -> None:
    """Check the arguments that name files, for workers on this machine.

    Raises:
        UsageError: a file does not exist.
    """
    for name in _FILES:
        value = args.get(name)
        if value is not None and not Path(value).is_file():
            raise _wrong(name, "an existing file", value)
    config = args.get("deepep_config") or "{}"
    if not (_is_object(config) or Path(config).is_file()):
        raise _wrong("deepep_config", "a JSON object or an existing file", config)
    checksum = args.get("model_checksum")
    if checksum and not (Path(checksum).is_file() or is_hub_name(checksum)):
        wanted = "'', an existing file, or 'owner/name' on the hub"
        raise _wrong("model_checksum", wanted, checksum)


def _is_object(value: str) -> bool:
    try:
        # SGLang uses the same parser, which accepts NaN.
        return isinstance(json.loads(value), dict)
    except (ValueError, RecursionError):
        return False


def _wrong(name: str, wanted: str, value: str) -> UsageError:
    return UsageError(f"{name} must be {wanted}, got {value!r:.200}")
