"""Read and check the configuration of a LoRA adapter, as PEFT saves it. Needs no torch."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from ..errors import InvalidAdapter, UsageError

CONFIG: Final = "adapter_config.json"
WEIGHTS: Final = "adapter_model.safetensors"
_OTHER_COMPUTATION: Final = (
    "alora_invocation_tokens",
    "alpha_pattern",
    "arrow_config",
    "kasa_config",
    "layer_replication",
    "lora_bias",
    "megatron_config",
    "modules_to_save",
    "monteclora_config",
    "rank_pattern",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "use_dora",
    "use_qalora",
    "velora_config",
)
"""Fields of ``LoraConfig`` that must be empty, because engines compute only ``scaling * B @ A``."""
_USED: Final = (
    "bias",
    "exclude_modules",
    "init_lora_weights",
    "layers_pattern",
    "layers_to_transform",
    "lora_alpha",
    "peft_type",
    "r",
    "target_modules",
    "task_type",
    "use_rslora",
)
_WITHOUT_EFFECT: Final = (
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
    "fan_in_fan_out",
    "inference_mode",
    "loftq_config",
    "lora_dropout",
    "lora_ga_config",
    "megatron_core",
    "merge_weights",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
)
"""Fields that never change the result of a linear layer, whatever their values are."""
_CHANGE_THE_BASE: Final = ("corda", "loftq", "lora_ga", "olora", "pissa")
"""Values of ``init_lora_weights`` that change the weights of the base model. "pissa" also has the
form "pissa_niter_16"."""
_MERGE: Final = (
    "merge the adapter (merge_and_unload) and send the model with update_weights instead"
)


class AdapterConfig(NamedTuple):
    """The configuration of an adapter.

    Attributes:
        scaling: the factor of ``B @ A`` in each module.
    """

    rank: int
    scaling: float


def checked_config(config: Any) -> AdapterConfig:
    """Check the configuration of an adapter.

    Raises:
        InvalidAdapter: engines cannot apply this adapter, or a value is wrong.
        UsageError: ``config`` is neither a ``LoraConfig`` nor a mapping.
    """
    fields = config.to_dict() if hasattr(config, "to_dict") else config
    if not isinstance(fields, Mapping):
        raise UsageError(
            "config must be PEFT's LoraConfig or a mapping of its fields, got "
            f"{type(config).__name__}"
        )
    kind = _value(fields.get("peft_type") or "LORA")
    if str(kind).upper() != "LORA":
        raise InvalidAdapter(f"peft_type is {kind!r}; only 'LORA' is supported: {_MERGE}")
    for name, value in fields.items():
        if name in _OTHER_COMPUTATION and value:
            raise InvalidAdapter(f"{name}={value!r:.100} of the adapter is not supported: {_MERGE}")
        if name not in (*_OTHER_COMPUTATION, *_USED, *_WITHOUT_EFFECT) and value:
            raise InvalidAdapter(
                f"{name}={value!r:.100} of the adapter is not a known field of LoraConfig; remove "
                "it if it does not change the result"
            )
    if (bias := fields.get("bias") or "none") != "none":
        raise InvalidAdapter(
            f"bias={bias!r} of the adapter is not supported; use 'none', or {_MERGE}"
        )
    if (task := _value(fields.get("task_type") or "CAUSAL_LM")) != "CAUSAL_LM":
        raise InvalidAdapter(f"task_type is {task!r}; engines generate text, which is 'CAUSAL_LM'")
    init = fields.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(_CHANGE_THE_BASE):
        raise InvalidAdapter(
            f"init_lora_weights={init!r} of the adapter changes the weights of the base model: "
            "convert it to a plain adapter (save_pretrained(path_initial_model_for_weight_"
            f"conversion=...)), or {_MERGE}"
        )
    rank, alpha = fields.get("r"), fields.get("lora_alpha")
    if type(rank) is not int or rank < 1:
        raise InvalidAdapter(f"r of the adapter must be an integer of at least 1, got {rank!r}")
    number = isinstance(alpha, (int, float)) and not isinstance(alpha, bool)
    if not number or not math.isfinite(alpha):  # type: ignore[arg-type]
        raise InvalidAdapter(f"lora_alpha of the adapter must be a number, got {alpha!r}")
    stabilized = fields.get("use_rslora") or False
    if type(stabilized) is not bool:
        raise InvalidAdapter(f"use_rslora of the adapter must be a bool, got {stabilized!r:.100}")
    root = math.sqrt(rank) if stabilized else rank
    return AdapterConfig(rank, alpha / root)  # type: ignore[operator]


def _value(member: Any) -> Any:
    """Return the value of a member of an enumeration, or any other value unchanged."""
    return getattr(member, "value", member)


def check_modules(config: Any, modules: Iterable[str]) -> None:
    """Check that PEFT would use all tensors of an adapter.

    PEFT ignores the tensors of a module that the configuration does not select.

    Args:
        config: a ``LoraConfig`` or a mapping of its fields.
        modules: the modules that have tensors, by their names in the base model.

    Raises:
        InvalidAdapter: the configuration does not select one of the modules.
    """
    fields = config.to_dict() if hasattr(config, "to_dict") else config
    for module in modules:
        for name, selects in (
            ("target_modules", _is_target),
            ("exclude_modules", _is_kept),
            ("layers_to_transform", _is_in_layers),
        ):
            try:
                selected = selects(fields, module)
            except (re.error, TypeError, ValueError):
                raise InvalidAdapter(
                    f"{name}={fields[name]!r:.200} of the adapter cannot be read"
                ) from None
            if not selected:
                raise InvalidAdapter(
                    f"the adapter has tensors of {module}, which {name}={fields[name]!r:.200} "
                    "leaves out, so PEFT would not use them; correct the field, or remove the "
                    "tensors"
                )


def _matches(pattern: Any, module: str) -> bool:
    if isinstance(pattern, str):
        return re.fullmatch(pattern, module) is not None
    return any(module == end or module.endswith(f".{end}") for end in pattern)


def _is_target(fields: Mapping[str, Any], module: str) -> bool:
    targets = fields.get("target_modules")
    return targets in (None, "all-linear") or _matches(targets, module)


def _is_kept(fields: Mapping[str, Any], module: str) -> bool:
    excluded = fields.get("exclude_modules")
    return not excluded or not _matches(excluded, module)


def _is_in_layers(fields: Mapping[str, Any], module: str) -> bool:
    layers = fields.get("layers_to_transform")
    if layers is None or layers == [] or isinstance(fields.get("target_modules"), str):
        return True
    given = fields.get("layers_pattern") or r"[^.]*"
    for pattern in [given] if isinstance(given, str) else given:
        if match := re.match(rf"(?:^|.*?\.){pattern}\.(\d+)\.", module):
            return int(match[1]) in ([layers] if isinstance(layers, int) else layers)
    return False


def saved_config(folder: Path) -> Any:
    """Return the fields of the configuration in the folder of an adapter.

    Raises:
        InvalidAdapter: the folder has no configuration, or the configuration cannot be read.
    """
    try:
        return json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InvalidAdapter(
            f"{folder} has no {CONFIG}: it is not the folder of an adapter"
        ) from None
    except (OSError, ValueError) as error:
        raise InvalidAdapter(f"{folder / CONFIG} cannot be read: {error}") from None


def weights_file(folder: Path) -> Path:
    """Return the file that holds the tensors of the adapter in a folder.

    Raises:
        InvalidAdapter: the folder has no such file.
    """
    file = folder / WEIGHTS
    if not file.is_file():
        raise InvalidAdapter(
            f"{folder} has no {WEIGHTS}; save the adapter with safe_serialization=True"
        )
    return file
