"""Read the active LoRA adapter of a ``PeftModel``, and check that an engine computes the same.

The check reads the modules, because the model's configuration is not enough: scalings can be set,
adapters can be merged, disabled or combined, and new versions of PEFT add kinds of adapters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import torch

from ..errors import InvalidAdapter
from .adapter_config import AdapterConfig, checked_config
from .tensor_source import Named, own_names

_INNER: Final = {"base_layer", "original_module", "token_adapter"}
"""Parts of names that PEFT adds to the parameters of a module that it wraps."""
_PREFIX: Final = "base_model.model."
"""The path of the base model in a ``PeftModel``."""


class PeftParts(NamedTuple):
    """The active adapter of a ``PeftModel``, and the model that it changes.

    Attributes:
        tensors: the tensors of the adapter, by the names in PEFT's files.
        base: the parameters of the base model, by their names in checkpoints.
    """

    config: AdapterConfig
    tensors: Named
    base: Named


class _Wrapper:
    """PEFT's wrapper of a module of the base model, of any kind.

    Attributes:
        parts: the parameters and buffers that the wrapper adds, by their names in the wrapper. The
            second part of such a name is the name of the adapter.
    """

    def __init__(self, path: str, module: Any) -> None:
        self.path, self.module = path, module
        tensors = [*module.named_parameters(), *module.named_buffers()]
        self.parts = {n: t for n, t in own_names(tensors) if _INNER.isdisjoint(n.split("."))}

    @property
    def adapters(self) -> set[str]:
        return {name.split(".")[1] for name in self.parts if "." in name}

    def check(self, adapter: str) -> None:
        """Check that the wrapper only adds ``scaling * B @ A @ x`` to the result of a linear layer.

        Raises:
            InvalidAdapter: the wrapper computes something else.
        """
        if adapter not in self.module.active_adapters:
            raise InvalidAdapter(
                f"the adapter {adapter!r} is active in other modules and not in {self.path}; "
                "call set_adapter"
            )
        variant = getattr(self.module, "lora_variant", {}).get(adapter)
        if variant is not None:
            raise InvalidAdapter(
                f"{self.path} has {type(variant).__name__}; engines compute plain LoRA only"
            )
        plain = {f"lora_{part}.{adapter}.weight" for part in "AB"}
        given = {name for name in self.parts if name.split(".")[1:2] == [adapter]}
        if other := sorted(given ^ plain):
            raise InvalidAdapter(
                f"{self.path} {'has' if other[0] in given else 'lacks'} {other[0]}; engines "
                "compute lora_A and lora_B of linear layers without a bias, and nothing else"
            )
        for part in ("lora_A", "lora_B"):
            if not isinstance(getattr(self.module, part)[adapter], torch.nn.Linear):
                raise InvalidAdapter(f"{self.path}.{part} is not a linear layer")

    def settings(self, adapter: str) -> AdapterConfig:
        scaling = float(self.module.scaling[adapter])
        if not math.isfinite(scaling):
            raise InvalidAdapter(f"{self.path} has the scaling {scaling}, which is not finite")
        return AdapterConfig(self.module.r[adapter], scaling)

    def tensors(self, adapter: str) -> Named:
        path = _PREFIX + self.path.removeprefix(_PREFIX)
        return [
            (f"{path}.{part}.weight", self.parts[f"{part}.{adapter}.weight"])
            for part in ("lora_A", "lora_B")
        ]


def is_peft_model(model: Any) -> bool:
    """Return True for PEFT's models, and for models of transformers after ``add_adapter``."""
    return hasattr(model, "peft_config") and hasattr(model, "base_model")


def parts_of_peft(model: Any) -> PeftParts:
    """Return the parts of a ``PeftModel``. The tensors are not copied.

    Raises:
        InvalidAdapter: an engine would not compute the same as the model.
    """
    wrappers = [
        _Wrapper(path, module)
        for path, module in model.named_modules()
        if hasattr(module, "adapter_layer_names") and hasattr(module, "active_adapters")
    ]
    adapter = _active(model, wrappers)
    checked_config(model.peft_config[adapter])
    used = [one for one in wrappers if adapter in one.adapters]
    settings: dict[AdapterConfig, str] = {}
    for one in used:
        one.check(adapter)
        settings.setdefault(one.settings(adapter), one.path)
    if len(settings) > 1:
        each = [
            f"{path} has rank {one.rank} and scaling {one.scaling:g}"
            for one, path in settings.items()
        ]
        raise InvalidAdapter(
            f"{' and '.join(each[:2])}; engines use one rank and one scaling for all modules"
        )
    tensors = [tensor for one in used for tensor in one.tensors(adapter)]
    return PeftParts(next(iter(settings)), tensors, [*_base(model, wrappers)])


def _active(model: Any, wrappers: list[_Wrapper]) -> str:
    """Return the name of the only adapter that the model applies.

    Raises:
        InvalidAdapter: the model applies several adapters or none, or an adapter is merged.
    """
    if any(one.module.disable_adapters for one in wrappers):
        raise InvalidAdapter(
            "the adapters of the PeftModel are disabled; leave the block of disable_adapter(), or "
            "call enable_adapter_layers()"
        )
    if merged := sorted({name for one in wrappers for name in one.module.merged_adapters}):
        raise InvalidAdapter(
            f"the adapter {', '.join(map(repr, merged))} is merged into the weights of the "
            "PeftModel; call unmerge_adapter() first"
        )
    active = sorted(
        {a for one in wrappers for a in one.module.active_adapters if a in one.adapters}
    )
    if len(active) > 1:
        raise InvalidAdapter(
            f"the PeftModel applies the adapters {', '.join(map(repr, active))} at once; select "
            "one with set_adapter, or combine them with add_weighted_adapter"
        )
    if not active:
        # Adapters without wrappers, for example prompts, have another ``peft_type``.
        for config in model.peft_config.values():
            checked_config(config)
        raise InvalidAdapter("the PeftModel has no active adapter; select one with set_adapter")
    return str(active[0])


def _base(model: Any, wrappers: list[_Wrapper]) -> Iterator[tuple[str, torch.Tensor]]:
    added = {id(tensor) for one in wrappers for tensor in one.parts.values()}
    for name, tensor in own_names(model.named_parameters()):
        if id(tensor) not in added:
            path = name.removeprefix(_PREFIX).split(".")
            yield ".".join(part for part in path if part not in _INNER), tensor
