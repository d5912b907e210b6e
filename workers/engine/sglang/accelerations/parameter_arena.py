"""Move a model's parameters into memory that can be exchanged (see ``double_buffer.py``)."""

from __future__ import annotations

import logging
from typing import Any

import torch

from ....weights.double_buffer import Pages, make_pages
from ..patch import Setup

logger = logging.getLogger("sglrl.worker")

_ALIGNMENT = 512
"""Alignment in bytes, the same as for memory from CUDA's allocator."""


def install(setup: Setup) -> None:
    """Patch SGLang to move the parameters of every model that it loads.

    The parameters move before other code stores their addresses, for example attention backends
    and CUDA graphs. The runner's ``sglrl_pages`` is the result of ``move``, or None.
    """
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.utils.torch_memory_saver_adapter import TorchMemorySaverAdapter

    load = ModelRunner.load_model

    def load_model(runner: Any, *args: Any, **kwargs: Any) -> Any:
        saver = runner.memory_saver_adapter
        # The moved parameters can be freed without torch_memory_saver, so turn the saver off.
        runner.memory_saver_adapter = TorchMemorySaverAdapter.create(enable=False)
        try:
            result = load(runner, *args, **kwargs)
        finally:
            runner.memory_saver_adapter = saver
        runner.sglrl_pages = None
        # Quantized weights are never updated, and their kernels may already hold the addresses.
        plain = runner.model_config.quantization is None
        if plain and not runner.is_draft_worker:
            runner.sglrl_pages = move(runner.model)
        return result

    ModelRunner.load_model = load_model


def move(model: torch.nn.Module) -> Pages | None:
    """Move the parameters that share their memory with no other tensor.

    Returns:
        The memory. None if there are no such parameters, if the parameters are on several devices,
        or if the device has no room or no support for memory that can be exchanged.
    """
    movable = [p for p in model.parameters() if p.is_contiguous() and p.numel() and _alone(p)]
    devices = {p.device for p in movable}
    if len(devices) != 1:
        return None
    offsets = []
    size = 0
    for parameter in movable:
        offsets.append(size)
        size += -(-parameter.nbytes // _ALIGNMENT) * _ALIGNMENT
    (device,) = devices
    try:
        pages = make_pages(size, device)
    except (RuntimeError, OSError) as error:
        logger.warning("new weights will be copied into place: %s", error)
        return None
    if pages is None:
        return None
    with torch.no_grad():
        for parameter, offset in zip(movable, offsets, strict=True):
            place = pages.live[offset : offset + parameter.nbytes]
            moved = place.view(parameter.dtype).view(parameter.shape)
            moved.copy_(parameter.data)
            parameter.data = moved
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return pages


def _alone(parameter: torch.nn.Parameter) -> bool:
    """Return True if no other tensor uses the parameter's memory."""
    whole = parameter.untyped_storage().nbytes() == parameter.nbytes
    return whole and _uses(parameter) == _uses(torch.empty(1))


def _uses(tensor: torch.Tensor) -> int:
    """Return the reference count of a tensor's storage."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))
