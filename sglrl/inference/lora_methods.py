"""The methods of ``Client`` that load and unload LoRA adapters."""

from __future__ import annotations

from typing import Any

from ..core.policy_versions import MODEL
from .adapters import AdapterPort, LoraInfo
from .client_base import ClientBase


class LoraMethods(ClientBase):
    """The adapter methods of ``Client``. The client sets this attribute."""

    _adapters: AdapterPort

    @property
    def loras(self) -> dict[str, LoraInfo]:
        """The loaded adapters by name.

        Raises:
            UsageError: another process has launched the pool.
        """
        return dict(self._adapters.loaded)

    @property
    def policy_versions(self) -> dict[str, int]:
        """The current version of the model, with the name "", and of each adapter by its name.

        A client in another process has the versions of the pool's latest message.
        """
        return {MODEL: self._pool.weights.version, **self._adapters.versions}

    async def load_lora(
        self, name: str, adapter: Any, *, config: Any = None, timeout: float = 60.0
    ) -> LoraInfo:
        """Load a LoRA adapter on all workers, for ``generate(..., lora=name)``.

        Workers that start later load it before they serve. ``update_weights(..., lora=name)``
        replaces it. Requests of different adapters, and of none, run in the same batch. Adapters
        and their versions do not share KV cache.

        The engine must be launched with ``enable_lora=True``, ``max_lora_rank=`` and
        ``lora_target_modules=``, or with ``lora_paths=``. A client of ``sglrl.connect`` loads
        folders, which the process that launched the pool must be able to read.

        Args:
            name: text of 1 to 256 characters.
            adapter: a folder that PEFT saved (``adapter_config.json``,
                ``adapter_model.safetensors``), a ``PeftModel``, or the adapter's tensors by PEFT's
                names: a mapping, a TensorDict or an iterable of (name, tensor).
            config: PEFT's ``LoraConfig``, or a mapping of its fields. ``r`` and ``lora_alpha`` are
                required. The engine takes the modules from the names of the tensors, and fields
                that select modules must select all of them. None: the one of the folder or of the
                ``PeftModel``.
            timeout: seconds from this call until all workers must have prepared the adapter.

        Raises:
            InvalidAdapter: the configuration is missing or not supported, names, shapes or the
                rank do not fit the engine, or the engine would not compute the same as the
                ``PeftModel``. No worker has the adapter.
            InvalidWeights: a value is not finite.
            UsageError: the name is in use, the engine takes no adapters, or ``max_loaded_loras``
                are loaded.
            DeadlineExceeded, UpdateInProgress: it took too long. No worker has the adapter.
            WorkerLost: no worker is left.
        """
        self._running()
        return await self._adapters.load(name, adapter, config, timeout)

    async def unload_lora(self, name: str, *, timeout: float = 60.0) -> None:
        """Unload an adapter on all workers.

        New calls with this adapter raise ``UnknownAdapter`` at once. Its running calls end with
        ``UnknownAdapter``.

        Args:
            timeout: seconds from this call until the workers must have unloaded it. A worker that
                is late is killed, and replaced by a worker without the adapter.

        Raises:
            UnknownAdapter: no such adapter is loaded.
            UpdateInProgress: another load was still running after ``timeout`` seconds.
        """
        self._running()
        await self._adapters.unload(name, timeout)
