"""The weights of a PEFT model with its adapters merged, under the names of the base model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def merged_adapters(model: Any) -> Iterator[dict[str, torch.Tensor]]:
    """Merge the active adapters of a ``PeftModel``, and restore its weights at the end.

    PEFT unmerges by subtraction, which rounds. A copy of the adapted weights is kept instead, so
    the weights are exactly the same afterwards.

    Yields:
        The tensors of the base model, by name. They share the memory of ``model``.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    kept = [
        (parameter, parameter.detach().clone())
        for layer in layers
        for parameter in layer.get_base_layer().parameters()
    ]
    model.merge_adapter()
    try:
        yield _base_weights(model, {name for layer in layers for name in layer.adapter_layer_names})
    finally:
        model.unmerge_adapter()
        for parameter, before in kept:
            parameter.data.copy_(before)


def _base_weights(model: Any, adapter_names: set[str]) -> dict[str, torch.Tensor]:
    """Return the base model's tensors without the parts that PEFT adds to their names."""
    found = {}
    for name, tensor in model.get_base_model().state_dict().items():
        # modules_to_save has trained copies of whole modules beside the original ones.
        name = name.replace(f".modules_to_save.{model.active_adapter}", "")
        is_other_copy = ".original_module." in name or ".modules_to_save." in name
        if not is_other_copy and adapter_names.isdisjoint(name.split(".")):
            found[name.replace(".base_layer", "")] = tensor
    return found
