"""Copy a model, without the data of its tensors, for a loader that must not change the model.

``weight_plan`` runs the model's loader on the copy. The copy shares no memory with the model, so
the loader cannot change a weight: not with an operator of PyTorch or of an extension, not by an
assignment to ``.data``, and not through a storage or a NumPy array.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from functools import partial
from types import MethodType
from typing import Any

import numpy as np
import torch


def storage_id(tensor: torch.Tensor) -> int:
    """Return an id of the tensor's storage. The id is unique while the storage exists."""
    return int(tensor.untyped_storage()._cdata)


class StandIn:
    """Makes a copy of a model with the same modules, parameters, buffers and attributes.

    Every tensor is replaced by a tensor on the meta device with the same type, shape, strides and
    offset in its storage. Tensors that share a storage also share a storage in the copy. Containers
    and bound methods are copied, so that they refer to the copy of the model. All other objects are
    shared with the model.

    Attributes:
        model: the copy.
    """

    def __init__(self, model: Any) -> None:
        self._copies: dict[int, tuple[Any, Any]] = {}
        """Each original and its copy, by ``id`` of the original.

        The reference to the original prevents the reuse of its id.
        """
        self._storages: dict[int, Any] = {}
        """The meta storage that replaces each live storage, by id of the live storage."""
        self._live: dict[int, torch.Tensor] = {}
        """By id of a meta storage: a live tensor in the storage that the meta storage replaces."""
        self.model = self._copy(model)

    @property
    def storages(self) -> set[int]:
        """The ids of all storages in the copy."""
        return set(self._live)

    def live(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the model's own tensor for a tensor of the copy, or for a view of it."""
        owner = self._live[storage_id(tensor)]
        view = torch.empty(0, dtype=tensor.dtype, device=owner.device)
        return view.set_(
            owner.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
        )

    def changes(self) -> Iterator[str]:
        """Yield a description of each change to the copy that is not a write into a tensor."""
        for original, copy in list(self._copies.values()):
            if isinstance(original, torch.Tensor):
                own = storage_id(copy) in self._live
                if not own or _geometry(original) != _geometry(copy):
                    yield "a tensor gets other data"
            elif isinstance(original, torch.nn.Module):
                for name, tensor in _held(copy):
                    if storage_id(tensor) not in self._live:
                        yield f"{type(copy).__name__}.{name} is assigned"

    def _copy(self, value: Any) -> Any:
        if id(value) in self._copies:
            return self._copies[id(value)][1]
        kind = type(value)
        copy: Any
        if isinstance(value, torch.Tensor):
            copy = self._tensor(value)
            self._copies[id(value)] = (value, copy)
            copy.__dict__.update(self._entries(value.__dict__))
        elif isinstance(value, torch.nn.Module):
            copy = object.__new__(kind)
            self._copies[id(value)] = (value, copy)
            copy.__dict__.update(self._entries(value.__dict__))
        elif kind in (dict, OrderedDict):
            copy = kind()
            self._copies[id(value)] = (value, copy)
            copy.update(self._entries(value))
        elif kind is list:
            copy = []
            self._copies[id(value)] = (value, copy)
            copy.extend(map(self._copy, value))
        elif kind in (tuple, set):
            copy = kind(map(self._copy, value))
        elif kind is MethodType and isinstance(value.__self__, (torch.nn.Module, torch.Tensor)):
            copy = MethodType(value.__func__, self._copy(value.__self__))
        elif isinstance(value, np.ndarray):
            # The array may be a view of a tensor. A write to a read-only copy raises an error.
            copy = value.view()
            copy.flags.writeable = False
        elif kind is partial:
            copy = partial(self._copy(value.func), *map(self._copy, value.args))
            copy.keywords.update(self._entries(value.keywords))
        else:
            copy = value
        return copy

    def _entries(self, values: Any) -> dict[Any, Any]:
        return {name: self._copy(value) for name, value in list(values.items())}

    def _tensor(self, live: torch.Tensor) -> torch.Tensor:
        storage = self._storages.get(storage_id(live))
        if storage is None:
            storage = torch.UntypedStorage(live.untyped_storage().nbytes(), device="meta")
            self._storages[storage_id(live)] = storage
        plain = torch.empty(0, dtype=live.dtype, device="meta")
        plain.set_(storage, live.storage_offset(), live.shape, live.stride())
        self._live[storage_id(plain)] = live
        make: Any = torch.Tensor._make_subclass
        return make(type(live), plain, live.requires_grad)


def _geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    size = tensor.untyped_storage().nbytes()
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset(), size


def _held(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters, buffers and other tensors of this module alone, by name."""
    for values in (module._parameters, module._buffers, module.__dict__):
        for name, value in list(values.items()):
            if isinstance(value, torch.Tensor):
                yield name, value
