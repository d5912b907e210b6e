"""Read a LoRA adapter from files or tensors, check it, and pack it into messages for workers."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from ..core.adapters import check_adapter, leaf_of, module_of, own_name
from ..errors import InvalidAdapter, UsageError
from ..wire.engine import EngineInfo
from ..wire.weights import ModelDescription, TensorSpec
from .adapter_config import (
    AdapterConfig,
    check_modules,
    checked_config,
    saved_config,
    weights_file,
)
from .finite import FiniteCheck
from .peft_model import is_peft_model, parts_of_peft
from .tensor_source import Taken, take, unwrapped

_PART_BYTES: Final = 16 << 20
"""Bytes of tensors in one message, unless a single tensor is larger."""


class GivenAdapter(NamedTuple):
    """An adapter as a caller gives it.

    Attributes:
        config: the checked configuration. None for tensors that came without a configuration.
        tensors: the tensors of the adapter, or the file that holds them.
        fields: the configuration as the caller or the adapter's folder gives it. It must select
            the modules of all tensors. None for a ``PeftModel``, or if ``config`` is None.
        base: the parameters of the model that the adapter changes, or None if they are unknown.
    """

    config: AdapterConfig | None
    tensors: Taken | Path
    fields: Any = None
    base: Taken | None = None


def read_adapter(adapter: Any, config: Any = None) -> GivenAdapter:
    """Record the state of a caller's adapter. The caller's CUDA streams must be current.

    Args:
        adapter: a folder, a ``PeftModel``, or tensors in a form that ``update_weights`` accepts.
        config: PEFT's ``LoraConfig``, or a mapping of its fields. None uses the configuration of
            ``adapter``, if ``adapter`` is a folder or a ``PeftModel``.

    Raises:
        InvalidAdapter: the configuration or a file is missing or wrong, or an engine would not
            compute the same as PEFT.
        UsageError: ``adapter`` or ``config`` has an unsupported type.
    """
    adapter = unwrapped(adapter)
    if is_peft_model(adapter):
        own, named, base = parts_of_peft(adapter)
        if config is not None and (given := checked_config(config)) != own:
            raise InvalidAdapter(
                f"config= has rank {given.rank} and scaling {given.scaling:g}, and the PeftModel "
                f"{own.rank} and {own.scaling:g}; leave config= out"
            )
        return GivenAdapter(own, take(named), base=take(base))
    tensors: Taken | Path
    if isinstance(adapter, (str, os.PathLike)):
        folder = Path(adapter).expanduser()
        config = saved_config(folder) if config is None else config
        tensors = weights_file(folder)
    else:
        if isinstance(adapter, bytes) or not isinstance(adapter, (Iterable, torch.nn.Module)):
            raise UsageError(
                "an adapter is a folder, a PeftModel, or tensors by name, not "
                f"{type(adapter).__name__}"
            )
        tensors = take(adapter)
    return GivenAdapter(None if config is None else checked_config(config), tensors, config)


class AdapterCargo(NamedTuple):
    """The tensors of a checked adapter in the form in which they are sent.

    Attributes:
        parts: the specs and the data of each message. The data of the tensors are concatenated.
        modules: the last parts of the names of the modules that the adapter changes.
        size: the total size of the tensors in bytes.
    """

    parts: list[tuple[list[TensorSpec], memoryview]]
    modules: tuple[str, ...]
    size: int


def load_payload(
    given: GivenAdapter,
    config: AdapterConfig,
    info: EngineInfo,
    model: ModelDescription | None,
    check_finite: bool = True,
) -> AdapterCargo:
    """Read, check and pack an adapter. This takes long, so call it in a thread.

    Raises:
        InvalidAdapter, InvalidWeights: the adapter does not fit the engine, or is not finite.
    """
    source = given.tensors
    named, ready = (_read(source), []) if isinstance(source, Path) else source
    for event in ready:
        event.synchronize()
    tensors = {own_name(name): tensor.detach() for name, tensor in named}
    if len(tensors) < len(named):
        raise InvalidAdapter("two tensors of the adapter have the same name")
    specs = [
        TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in tensors.items()
    ]
    check_adapter(specs, config.rank, info, model)
    if given.fields is not None:
        check_modules(given.fields, dict.fromkeys(map(module_of, tensors)))
    dtype = getattr(torch, info.dtype)
    if check_finite:
        check = FiniteCheck()
        check.add((name, tensor, dtype) for name, tensor in tensors.items())
        check.finish()
    data = _data([*tensors.values()], dtype)
    parts: list[tuple[list[TensorSpec], memoryview]] = []
    part: list[TensorSpec] = []
    begin = end = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * dtype.itemsize
        if part and end + size - begin > _PART_BYTES:
            parts.append((part, data[begin:end]))
            part, begin = [], end
        part.append(TensorSpec(name, info.dtype, tuple(tensor.shape)))
        end += size
    parts.append((part, data[begin:end]))
    modules = sorted({leaf_of(name) for name in tensors})
    return AdapterCargo(parts, tuple(modules), len(data))


def _read(file: Path) -> list[tuple[str, torch.Tensor]]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return list(load_file(file).items())
    except (SafetensorError, OSError) as error:
        raise InvalidAdapter(f"{file} cannot be read: {error}") from None


def _data(tensors: list[torch.Tensor], dtype: torch.dtype) -> memoryview:
    """Return a copy of the tensors' bytes. Tensors on a GPU are copied in one transfer."""
    full = [t.full_tensor() if hasattr(t, "full_tensor") else t for t in tensors]
    device = full[0].device
    flat = torch.cat([tensor.to(device, dtype).flatten() for tensor in full])
    if flat.is_cuda:
        flat = torch.empty(flat.shape, dtype=dtype, pin_memory=True).copy_(flat)
    return memoryview(flat.view(torch.uint8).numpy())
