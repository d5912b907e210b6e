"""The LoRA adapters of one rank, in SGLang's own memory pool.

``lora_calls.py`` creates the commands. Every rank of a replica executes a command at the same place
in its loop. A separate thread prepares an adapter, so the engine continues during the preparation.
The commit runs between two steps: it copies the tensors to the adapter's slot of the pool, if the
adapter has a slot. A new version keeps SGLang's id of the adapter, so running requests
continue with the new tensors.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from math import prod
from typing import Any

import torch
from sglang.srt.layers.utils import get_layer_id
from sglang.srt.lora.layers import FusedMoEWithLoRA
from sglang.srt.lora.lora import LoRAAdapter
from sglang.srt.lora.lora_config import LoRAConfig
from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.lora.utils import get_stacked_multiply

from sglrl.core.adapters import STACKED, parent_of, siblings
from sglrl.errors import EngineError, InvalidAdapter

from .commands import AdapterCommand, CommitAdapter, DropAdapters, PrepareAdapter
from .patch import Setup


def install(setup: Setup) -> Callable[[Any], bool]:
    """Return a function that sets the ``sglrl_adapters`` of the finished scheduler."""

    def finish(scheduler: Any) -> bool:
        scheduler.sglrl_adapters = Adapters(scheduler)
        if setup.adapter is not None:
            setup.adapter.lora.start(scheduler.sglrl_adapters)
        return True

    return finish


class _Preparation:
    """An adapter that ``thread`` prepares. It is ready once the thread ends without ``error``.

    Attributes:
        adapter: SGLang's adapter, with tensors in the memory of the host.
        staged: an adapter with the same tensors on the GPU. On a CPU, the same as ``adapter``.
        error: the reason why the preparation failed, or None.
    """

    def __init__(self, command: PrepareAdapter) -> None:
        self.command = command
        self.adapter: Any = None
        self.staged: Any = None
        self.error: Exception | None = None
        self.thread: threading.Thread


class Adapters:
    """The adapters of one rank's scheduler. Only the scheduler's thread calls the methods.

    Attributes:
        versions: the version that the next step uses, by SGLang's id of the adapter. A change
            replaces the mapping.
        on_prepared: called on another thread with a finished command and its error, if any.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._manager = manager = scheduler.tp_worker.model_runner.lora_manager
        self._preparing: dict[int, _Preparation] = {}
        self._serials: dict[str, int] = {}
        self.versions: Mapping[str, int] = {}
        self.on_prepared: Callable[[PrepareAdapter, Exception | None], None] = lambda *_: None
        wrapped = [name for layer in manager.lora_modules for name in layer]
        wanted = sorted(manager.target_modules)
        if not wrapped:
            raise EngineError(f"the model has no modules {', '.join(wanted)} (lora_target_modules)")
        if any(
            isinstance(module, FusedMoEWithLoRA)
            for layer in manager.lora_modules
            for module in layer.values()
        ):
            raise EngineError(
                "adapters cannot change the experts of this model: remove gate_proj, up_proj and "
                "down_proj from lora_target_modules"
            )

    @property
    def max_rank(self) -> int:
        return int(self._manager.max_lora_rank)

    @property
    def target_modules(self) -> tuple[str, ...]:
        """The names of the modules that adapters may change, as in checkpoints."""
        names: set[str] = set()
        for name in self._manager.target_modules:
            names.update(STACKED.get(name, (name,)))
        return tuple(sorted(names))

    def cache_key(self, uid: str) -> str:
        """Return the adapter's part of a KV cache key. Each version of an adapter has its own."""
        return f"/{self._serials[uid]}/"

    def execute(self, command: AdapterCommand) -> float:
        """Execute a command between two steps. Return the duration in milliseconds.

        Raises:
            EngineError: an adapter of this command could not be prepared. The worker must exit.
        """
        begun = time.perf_counter()
        match command:
            case PrepareAdapter():
                self._prepare(command)
            case CommitAdapter():
                self._commit(command)
            case DropAdapters():
                self._drop(command)
        return (time.perf_counter() - begun) * 1e3

    def _prepare(self, command: PrepareAdapter) -> None:
        made = self._preparing[command.serial] = _Preparation(command)
        made.thread = threading.Thread(target=self._make, args=(made,), name="sglrl-lora")
        made.thread.start()

    def _commit(self, command: CommitAdapter) -> None:
        uid, manager = command.uid, self._manager
        made = self._preparing.pop(command.serial)
        made.thread.join()
        if made.error is not None:
            raise EngineError(f"the adapter {command.name!r} could not be loaded: {made.error}")
        if command.inflight == "retract":
            self._scheduler.sglrl_retract()
        manager.configs[uid] = made.adapter.config
        manager.loras[uid] = made.adapter
        manager.lora_refs[uid] = LoRARef(
            lora_id=uid, lora_name=uid, lora_path="__tensor__", pinned=False
        )
        pool = manager.memory_pool
        slot = pool.uid_to_buffer_id.get(uid)
        if slot is not None:
            with torch.no_grad(), self._stream():
                pool.load_lora_weight_to_buffer(
                    uid, slot, made.staged, manager.lora_modules, None, None
                )
                manager._notify_lora_slots_updated({slot})
        self._serials[uid] = command.serial
        self.versions = {**self.versions, uid: command.version}
        self._scheduler.sglrl_new_keys()

    def _drop(self, command: DropAdapters) -> None:
        for serial in command.serials:
            self._preparing.pop(serial, None)
        for uid in command.uids:
            result = self._manager.unload_lora_adapter(
                LoRARef(lora_id=uid, lora_name=uid, lora_path="__tensor__", pinned=False)
            )
            if not result.success:
                raise EngineError(f"an adapter could not be unloaded: {result.error_message}")
            del self._serials[uid]
        self.versions = {u: v for u, v in self.versions.items() if u not in command.uids}

    def _stream(self) -> AbstractContextManager[Any]:
        """Return a context in which kernels run in the order of the model's steps."""
        scheduler = self._scheduler
        if self._manager.device.type != "cuda" or not scheduler.enable_overlap:
            return nullcontext()
        context: AbstractContextManager[Any] = torch.cuda.stream(scheduler.forward_stream)
        return context

    # --- on the thread of a preparation -----------------------------------------------------------

    def _make(self, made: _Preparation) -> None:
        try:
            self._make_adapter(made)
        except Exception as error:
            made.error = error
        self.on_prepared(made.command, made.error)

    def _make_adapter(self, made: _Preparation) -> None:
        command, manager = made.command, self._manager
        if command.rank > self.max_rank:
            raise InvalidAdapter(
                f"the adapter has rank {command.rank}; at most {self.max_rank} (max_lora_rank)"
            )
        if manager.device.type != "cuda":
            made.adapter = made.staged = self._checked(command)
            return
        with torch.cuda.stream(torch.cuda.Stream(manager.device)):
            made.staged = self._checked(command)
            packed = _packed(made.staged)
            host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True).copy_(packed)
        made.adapter = self._adapter(command, {})
        _unpack(host, made.staged, made.adapter)

    def _checked(self, command: PrepareAdapter) -> Any:
        """Return SGLang's adapter, with tensors on the device of the pool.

        Raises:
            InvalidAdapter: a tensor does not fit its module.
        """
        adapter = self._adapter(command, self._completed(self._given(command)))
        self._check(adapter)
        return adapter

    def _given(self, command: PrepareAdapter) -> dict[str, torch.Tensor]:
        """Return the command's tensors by name, in new memory on the device of the pool."""
        device = self._manager.device
        size = sum(len(part.data) for part in command.parts)
        flat = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
        memory, end = memoryview(flat.numpy()), 0
        for part in command.parts:
            begin, end = end, end + len(part.data)
            memory[begin:end] = part.data
        flat = flat.to(device, non_blocking=True)
        tensors, end = {}, 0
        for spec in (spec for part in command.parts for spec in part.tensors):
            dtype = getattr(torch, spec.dtype)
            begin, end = end, end + prod(spec.shape) * dtype.itemsize
            tensor = flat[begin:end].view(dtype).view(spec.shape)
            tensors[spec.name] = tensor.to(self._manager.dtype)
        return tensors

    def _adapter(self, command: PrepareAdapter, tensors: Mapping[str, torch.Tensor]) -> Any:
        manager = self._manager
        config = LoRAConfig.from_dict(
            {
                "peft_type": "LORA",
                "r": command.rank,
                "lora_alpha": command.scaling * command.rank,
                "target_modules": list(self.target_modules),
            }
        )
        adapter = LoRAAdapter(
            str(command.serial),
            config,
            manager.base_hf_config,
            manager.load_config,
            manager.lora_backend,
            base_model=manager.base_model,
        )
        # ``initialize_weights_from_tensors`` would move the tensors to the memory of the host.
        for name, tensor in tensors.items():
            adapter.layers[get_layer_id(name)].weights[name] = tensor
        adapter._normalize_weights()
        return adapter

    def _completed(self, given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Add zero tensors for the other modules of each stack that the adapter changes.

        SGLang stacks the tensors of some modules, so it needs a tensor for each module of a stack.

        Raises:
            InvalidAdapter: a module is not in the pool, or a tensor does not fit it.
        """
        modules = {name: m for layer in self._manager.lora_modules for name, m in layer.items()}
        completed = dict(given)
        for name, tensor in given.items():
            module = modules.get(parent_of(name))
            if module is None:
                raise InvalidAdapter(
                    f"{name}: the model has no such module, or it is not one of the modules "
                    f"{', '.join(self.target_modules)} (lora_target_modules=)"
                )
            is_a = ".lora_A." in name
            stack = siblings(name)
            sizes = _output_sizes(module.base_layer, len(stack))
            for (leaf, other), size in zip(stack.items(), sizes, strict=True):
                shape = tuple(tensor.shape) if is_a else (size, tensor.shape[1])
                if other not in given:
                    completed[other] = tensor.new_zeros(shape)
                elif tuple(given[other].shape) != shape:
                    raise InvalidAdapter(
                        f"{other} has the shape {list(given[other].shape)}, and {leaf} needs "
                        f"{list(shape)}"
                    )
        return completed

    def _check(self, adapter: Any) -> None:
        """Check that the stacked tensors have the shapes of their places in SGLang's pool.

        SGLang itself compares the shapes only in a step, and exits if they differ.
        """
        manager, pool, rank = self._manager, self._manager.memory_pool, adapter.config.r
        for index, layer in enumerate(adapter.layers):
            modules = manager.lora_modules[index]
            for name, tensor in layer.weights.items():
                parent = parent_of(name)
                leaf, module = parent.rpartition(".")[2], modules[parent]
                if ".lora_A." in name:
                    part = module.slice_lora_a_weights(tensor)
                    rows = rank * get_stacked_multiply(leaf, manager.base_model)
                    place = pool.A_buffer[leaf][index][0, :rows]
                else:
                    part = module.slice_lora_b_weights(tensor)
                    place = pool.B_buffer[leaf][index][0, :, :rank]
                if part.shape != place.shape:
                    raise InvalidAdapter(
                        f"{name} has the shape {list(part.shape)}, and the model needs "
                        f"{list(place.shape)}"
                    )


def _output_sizes(layer: Any, stacked: int) -> list[int]:
    """Return the output size of each module in a linear layer of SGLang, summed over all ranks."""
    if hasattr(layer, "total_num_heads"):
        values = getattr(layer, "v_head_size", None) or layer.head_size
        heads, shared = layer.total_num_heads, layer.total_num_kv_heads
        return [heads * layer.head_size, shared * layer.head_size, shared * values]
    sizes = getattr(layer, "output_sizes", None)
    return list(sizes) if sizes and len(sizes) == stacked else [layer.output_size]


def _packed(adapter: Any) -> torch.Tensor:
    """Return the tensors of an adapter, flattened and concatenated."""
    return torch.cat(
        [tensor.flatten() for layer in adapter.layers for tensor in layer.weights.values()]
    )


def _unpack(flat: torch.Tensor, like: Any, adapter: Any) -> None:
    """Set the tensors of ``adapter`` from ``flat``. ``like`` has their order and shapes."""
    begin = 0
    for there, here in zip(adapter.layers, like.layers, strict=True):
        weights = {}
        for name, tensor in here.weights.items():
            weights[name] = flat[begin : begin + tensor.numel()].view(tensor.shape)
            begin += tensor.numel()
        there.weights = weights
