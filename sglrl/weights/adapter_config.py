"""The configuration of a LoRA adapter, as PEFT saves it. Needs no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from ..errors import InvalidAdapter, UsageError

CONFIG: Final = "adapter_config.json"
WEIGHTS: Final = "adapter_model.safetensors"
_UNSUPPORTED: Final = (
    "alora_invocation_tokens",
    "alpha_pattern",
    "arrow_config",
    "layer_replication",
    "lora_bias",
    "modules_to_save",
    "rank_pattern",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "use_dora",
    "use_qalora",
)
"""Fields of PEFT's ``LoraConfig`` that must be empty: engines compute ``scaling * B @ A`` only."""


class AdapterConfig(NamedTuple):
    """The configuration of an adapter.

    Attributes:
        scaling: the factor of its update of a module.
    """

    rank: int
    scaling: float


def checked_config(config: Any) -> AdapterConfig:
    """Check the configuration of an adapter.

    Raises:
        InvalidAdapter: engines cannot apply this adapter, or a value is wrong.
        UsageError: ``config`` has another type.
    """
    fields = config.to_dict() if hasattr(config, "to_dict") else config
    if not isinstance(fields, Mapping):
        raise UsageError(
            "config must be PEFT's LoraConfig or a mapping of its fields, got "
            f"{type(config).__name__}"
        )
    kind = getattr(fields.get("peft_type", "LORA"), "value", fields.get("peft_type", "LORA"))
    if str(kind).upper() != "LORA":
        raise InvalidAdapter(f"peft_type is {kind!r}; only 'LORA' is supported")
    for name in _UNSUPPORTED:
        if fields.get(name):
            raise InvalidAdapter(f"{name}={fields[name]!r:.100} of the adapter is not supported")
    if (bias := fields.get("bias", "none")) != "none":
        raise InvalidAdapter(f"bias={bias!r} of the adapter is not supported; use 'none'")
    rank, alpha = fields.get("r"), fields.get("lora_alpha")
    if type(rank) is not int or rank < 1:
        raise InvalidAdapter(f"r of the adapter must be an integer of at least 1, got {rank!r}")
    number = isinstance(alpha, (int, float)) and not isinstance(alpha, bool)
    if not number or not math.isfinite(alpha):  # type: ignore[arg-type]
        raise InvalidAdapter(f"lora_alpha of the adapter must be a number, got {alpha!r}")
    root = math.sqrt(rank) if fields.get("use_rslora") else rank
    return AdapterConfig(rank, alpha / root)  # type: ignore[operator]


def saved_config(folder: Path) -> Any:
    """Return the fields of the configuration in the folder of an adapter.

    Raises:
        InvalidAdapter: there is none, or it cannot be read.
    """
    try:
        return json.loads((folder / CONFIG).read_text())
    except FileNotFoundError:
        raise InvalidAdapter(
            f"{folder} has no {CONFIG}: it is not the folder of an adapter"
        ) from None
    except (OSError, ValueError) as error:
        raise InvalidAdapter(f"{folder / CONFIG} cannot be read: {error}") from None


def weights_file(folder: Path) -> Path:
    """Return the file that holds the tensors of the adapter in a folder.

    Raises:
        InvalidAdapter: there is none.
    """
    file = folder / WEIGHTS
    if not file.is_file():
        raise InvalidAdapter(
            f"{folder} has no {WEIGHTS}; save the adapter with safe_serialization=True"
        )
    return file
