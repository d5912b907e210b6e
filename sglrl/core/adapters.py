"""LoRA adapters as PEFT saves them: the names and the shapes of their tensors.

A tensor's name is ``base_model.model.<module>.lora_A.weight`` or ``...lora_B.weight``, where
``<module>`` is the name of a linear layer of the model in transformers. For the input x of the
layer, [in], the adapter adds ``scaling * B @ A @ x`` to the layer's output, [out]. A is [rank, in],
and B is [out, rank].
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from ..errors import InvalidAdapter
from ..wire.engine import EngineInfo
from ..wire.weights import ModelDescription, TensorSpec

STACKED: Final = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""The modules of a checkpoint that the engine stacks into one module, in the order of the stack.
The key is the name of the engine's module."""
MODULES: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The modules that adapters may change, by the last part of their names."""

_PARENTS: Final = {leaf: parent for parent, leaves in STACKED.items() for leaf in leaves}
_NAME: Final = re.compile(r"base_model\.model\.(.+)\.lora_([AB])(?:\.default)?\.weight")
_SHOWN: Final = 4
_FLOATS: Final = ("float32", "float16", "bfloat16")


def own_name(name: str) -> str:
    """Return the name of a tensor in an adapter's file.

    In a ``PeftModel``, the name of a tensor also contains the name of the adapter. The function
    removes the adapter name "default", and rejects any other.

    Raises:
        InvalidAdapter: ``name`` is not the name of a tensor of an adapter.
    """
    module, part = _parse(name)
    return f"base_model.model.{module}.lora_{part}.weight"


def _parse(name: str) -> tuple[str, str]:
    match = _NAME.fullmatch(name)
    if match is None:
        raise InvalidAdapter(
            f"{name!r} is not a tensor of a LoRA adapter; PEFT names them "
            "'base_model.model.<module>.lora_A.weight' and '...lora_B.weight'"
        )
    return match[1], match[2]


def module_of(name: str) -> str:
    """Return the name of a tensor's module in the base model."""
    return _parse(name)[0]


def leaf_of(name: str) -> str:
    """Return the last part of the name of a tensor's module."""
    return _parse(name)[0].rpartition(".")[2]


def parent_of(name: str) -> str:
    """Return the name of the engine's module that contains a tensor's module."""
    path, dot, leaf = _parse(name)[0].rpartition(".")
    return path + dot + _PARENTS.get(leaf, leaf)


def siblings(name: str) -> dict[str, str]:
    """Return the names of this tensor and of its counterparts in the modules of the same stack.

    Returns:
        The name of each tensor by the last part of its module's name, in the order of the stack.
    """
    leaf = leaf_of(name)
    stack = STACKED.get(_PARENTS.get(leaf, ""), (leaf,))
    return {other: name.replace(f".{leaf}.lora_", f".{other}.lora_") for other in stack}


def check_adapter(
    specs: Sequence[TensorSpec], rank: int, info: EngineInfo, model: ModelDescription | None
) -> None:
    """Check that an adapter fits the engine.

    Args:
        specs: the tensors of the adapter, with the names that ``own_name`` returns.
        rank: the rank in the adapter's configuration.
        info: the limits that the engine was launched with.
        model: the tensors of the model, or None if they are not known.

    Raises:
        InvalidAdapter: the adapter does not fit.
    """
    if rank > info.max_lora_rank:
        raise InvalidAdapter(
            f"the adapter has rank {rank}; the engine was launched for at most "
            f"{info.max_lora_rank} (max_lora_rank=)"
        )
    if not specs:
        raise InvalidAdapter("the adapter has no tensors")
    given = {spec.name: spec for spec in specs}
    _check_modules(given, info)
    for name, spec in given.items():
        part = _parse(name)[1]
        if spec.dtype not in _FLOATS:
            raise InvalidAdapter(f"{name} holds {spec.dtype}; adapters hold {', '.join(_FLOATS)}")
        other = name.replace(f".lora_{part}.", f".lora_{'B' if part == 'A' else 'A'}.")
        if other not in given:
            raise InvalidAdapter(f"the adapter has {name} without {other}")
        own_rank = spec.shape[0 if part == "A" else -1] if len(spec.shape) == 2 else -1
        if own_rank != rank:
            where = "[rank, in]" if part == "A" else "[out, rank]"
            raise InvalidAdapter(
                f"{name} has the shape {list(spec.shape)}, which is not {where} of rank {rank}"
            )
    if model is not None:
        _check_shapes(given, model)


def _check_modules(names: Iterable[str], info: EngineInfo) -> None:
    wrong = sorted({leaf_of(name) for name in names} - set(info.lora_target_modules))
    if wrong:
        raise InvalidAdapter(
            f"the adapter changes the modules {', '.join(wrong[:_SHOWN])}; the engine was launched "
            f"for {', '.join(info.lora_target_modules)} (lora_target_modules=)"
        )


def _check_shapes(given: Mapping[str, TensorSpec], model: ModelDescription) -> None:
    shapes = {spec.name: spec.shape for spec in model.tensors}
    for name, spec in given.items():
        module, part = _parse(name)
        shape = shapes.get(f"{module}.weight")
        if shape is None or len(shape) != 2:
            raise InvalidAdapter(f"{name}: the model has no linear layer {module}")
        size, wanted = (spec.shape[1], shape[1]) if part == "A" else (spec.shape[0], shape[0])
        if size != wanted:
            raise InvalidAdapter(
                f"{name} has the shape {list(spec.shape)}, which does not fit {module}.weight, "
                f"{list(shape)}"
            )
