"""Convert the names of a trainer's tensors to the names of the engine's tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.weight_update.llm import get_sglang_model_metadata as _of_module

Metadata = Mapping[str, tuple[torch.dtype, torch.Size]]
_DERIVED: Final = ("inv_freq", "original_inv_freq")
"""The names of buffers that a model computes when it is created. Checkpoints do not contain these
buffers, but TensorDicts of modules do."""


def get_sglang_model_metadata(model: Any) -> dict[str, tuple[torch.dtype, torch.Size]]:
    """Return the dtype and the shape of each tensor, by name.

    For a module, the result has the tensors of the module, with adapters (PEFT) merged. For an
    ``AsyncSGLang``, it has the tensors that the engines accept.
    """
    of_service = getattr(model, "get_model_metadata", None)
    return dict(_of_module(model) if of_service is None else of_service())


def flat(weights: Any) -> dict[str, Any]:
    """Return tensors by dotted name, without derived buffers and extra state."""
    if isinstance(weights, Mapping) and any(isinstance(v, Mapping) for v in weights.values()):
        weights = TensorDict(dict(weights), batch_size=[])
    if isinstance(weights, TensorDictBase):
        weights = weights.flatten_keys(".")
    return {
        name: tensor
        for name, tensor in weights.items()
        if name.rpartition(".")[2] not in _DERIVED and not name.startswith("__extra_state__")
    }


def fitted(named: dict[str, Any], known: set[str]) -> dict[str, Any]:
    """Return the tensors under the engine's names.

    A module of TorchRL may contain the model under a prefix such as ``module.0.model``. The prefix
    is the same for every name, and this function removes it.
    """
    if any(name in known for name in named):
        return named
    for name in named:
        _, _, rest = name.partition(".")
        while rest:
            if rest in known:
                size = len(name) - len(rest)
                prefix = name[:size]
                return {n.removeprefix(prefix): tensor for n, tensor in named.items()}
            _, _, rest = rest.partition(".")
    return named
