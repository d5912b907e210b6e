"""TorchRL's ``SGLangWeightSyncScheme`` on the weight channel of an sglrl pool.

Generation continues while an update is staged. The update becomes live on every replica or on none.
Each update has a version, and every token that was sampled with its weights has this version.
"""

from __future__ import annotations

import copy
import os
import weakref
from collections.abc import Callable
from typing import Any, Literal

import torch
from torchrl.modules.llm.backends.sglang.sglang_utils import get_local_ip_address, get_open_port
from torchrl.weight_update.weight_sync_schemes import WeightStrategy, WeightSyncScheme

from ...launching.blocking import BlockingClient, blocking
from ...weights.update_report import UpdateReport
from .environment import PauseMode, logger, warn_of_unused
from .folder_transport import FolderTransport
from .pool_transport import SGLangCollectiveTransport, check_pause, client_of, update_pool
from .tensor_names import Metadata, flat


class SGLangWeightSyncScheme(WeightSyncScheme):  # type: ignore[misc]
    """Sends a trainer's weights to the replicas.

    ::

        scheme = SGLangWeightSyncScheme(service.server_url)
        sender = scheme.create_sender()
        sender.register_model(model)
        sender.init_all_workers_group(get_sglang_model_metadata(model))  # or with the first update
        sender.update_weights()

    Args:
        server_url: the pool's address (``service.server_url``, ``client.address``). In the process
            that started the pool, prefer the ``AsyncSGLang`` or ``BlockingClient`` itself.
        master_address: the address at which the replicas reach this process. None: the replicas run
            on this machine.
        master_port: accepted, but not used, because the weight channel chooses its own port.
        num_gpus: accepted, but not used, because the pool reports its number of GPUs.
        strategy: "tensordict" or "state_dict": how weights are extracted from a model.
        device: the device from which weights are sent. An integer: the GPU with this index, or the
            CPU if the engines run on the CPU.
        flush_cache_on_update: accepted, but not needed, because cache entries of old weights are
            never used with new weights.
        pause_mode: how an update treats running requests. "retract": they continue, and their KV
            cache is recomputed. "in_place": they continue with their KV cache. "abort": they return
            the tokens generated so far. None: ``$TORCHRL_SGLANG_PAUSE_GENERATION_MODE``, or
            "retract" if it is not set.
        timeout: the time limit of a replica for each phase of an update, in seconds.
        check_finite: as in ``Client.update_weights``.
        keys, insecure: as in ``sglrl.connect``.
        remote_addr: a folder. If given, updates are written there as memory-mapped tensordicts, and
            receivers apply them (``create_receiver``).
        local_addr: the path of the same folder on the receiver's machine. None: ``remote_addr``.
        num_threads: the number of threads that write the files.

    Raises:
        ValueError: an argument is invalid, or ``flush_cache_on_update`` is combined with a
            ``pause_mode`` in which TorchRL's scheme cannot flush.
    """

    def __init__(
        self,
        server_url: Any = None,
        master_address: str | None = None,
        master_port: int | None = None,
        num_gpus: int = 1,
        strategy: Literal["tensordict", "state_dict"] = "tensordict",
        device: torch.device | str | int | None = 0,
        flush_cache_on_update: bool | None = None,
        pause_mode: PauseMode | None = None,
        *,
        timeout: float = 300.0,
        check_finite: bool = True,
        keys: str | os.PathLike[str] | None = None,
        insecure: bool = False,
        remote_addr: str | os.PathLike[str] | None = None,
        local_addr: str | os.PathLike[str] | None = None,
        num_threads: int = 1,
    ) -> None:
        check_pause(pause_mode, flush_cache_on_update)
        warn_of_unused()
        if strategy not in ("tensordict", "state_dict"):
            raise ValueError(f"strategy must be 'tensordict' or 'state_dict', got {strategy!r}")
        if server_url is None and remote_addr is None:
            raise ValueError("give server_url, or remote_addr for updates through files")
        self.server_url = server_url.rstrip("/") if isinstance(server_url, str) else server_url
        self.host = master_address
        self.master_address = master_address or get_local_ip_address()
        self.master_port = master_port or int(get_open_port())
        self.num_gpus = num_gpus
        self.strategy_name = strategy
        self.device = device
        self.flush_cache_on_update = flush_cache_on_update
        self.pause_mode = pause_mode
        self.timeout = timeout
        self.check_finite = check_finite
        self.keys = keys
        self.insecure = insecure
        self.remote_addr = remote_addr
        self.local_addr = remote_addr if local_addr is None else local_addr
        self.num_threads = num_threads

    @property
    def world_size(self) -> int:
        """The size of the group, which has the trainer and ``num_gpus`` GPUs."""
        return 1 + self.num_gpus

    def create_transport(self, **kwargs: Any) -> SGLangCollectiveTransport | FolderTransport:
        """Create the transport of a sender."""
        if self.remote_addr is not None:
            return FolderTransport(self.remote_addr, self.num_threads)
        return SGLangCollectiveTransport(
            self.server_url,
            self.host,
            self.master_port,
            0,
            self.world_size,
            self.device,
            self.timeout,
            self.flush_cache_on_update,
            self.pause_mode,
            check_finite=self.check_finite,
            keys=self.keys,
            insecure=self.insecure,
        )

    def create_sender(self) -> SGLangWeightSender:
        """Create a sender in the trainer's process. With several ranks, use only the first rank.

        Raises:
            ValueError: ``server_url`` is not an address of a pool.
            TypeError: ``server_url`` is not an address, a service or a client.
        """
        if isinstance(self.server_url, str):
            # This call only checks the arguments. The client connects when it is entered.
            blocking.connect(self.server_url, keys=self.keys, insecure=self.insecure)
        elif self.server_url is not None:
            client = getattr(self.server_url, "client", self.server_url)
            if not isinstance(client, BlockingClient):
                raise TypeError(
                    "server_url must be the address of a pool, an AsyncSGLang of "
                    "sglrl.integrations.torchrl or a sglrl.BlockingClient, got "
                    f"{type(client).__name__}"
                )
        return SGLangWeightSender(self)

    def create_receiver(
        self, engine: Any = None, *args: Any, **kwargs: Any
    ) -> SGLangWeightReceiver | None:
        """Create a receiver for updates through files.

        Args:
            engine: the receiver applies updates to this ``AsyncSGLang``, ``BlockingClient`` or
                address. None: ``server_url``.
            *args, **kwargs: accepted as in TorchRL, but not used.

        Returns:
            The receiver. None if there is neither ``engine`` nor ``remote_addr``, because the
            sender then sends updates directly to the replicas.
        """
        if engine is None and self.remote_addr is None:
            return None
        return SGLangWeightReceiver(self, engine)


class SGLangWeightSender:
    """Sends weights from the trainer's process."""

    def __init__(self, scheme: SGLangWeightSyncScheme) -> None:
        self._scheme = scheme
        self._model_ref: Callable[[], Any] | None = None
        self._transport: Any = None
        self._ended = False
        self._collectors: list[Any] = []
        self._post_hooks: list[Callable[[], None]] = []
        if scheme.remote_addr is not None:
            self._transport = scheme.create_transport()

    def register_collector(self, collector: Any) -> None:
        """Register a collector. Every update calls ``collector.increment_version()`` at its end."""
        self._collectors.append(collector)
        if not self._post_hooks:
            self._post_hooks.append(self._increment_versions)

    def _increment_versions(self) -> None:
        for collector in self._collectors:
            try:
                collector.increment_version()
            except Exception as error:
                # The weights are live, so a failing collector must not fail the update.
                logger.warning("a collector could not increment its version: %s", error)

    def register_model(self, model: Any) -> None:
        """Register the model whose weights ``update_weights`` sends.

        The reference is weak, so the program must keep the model.
        """
        self._model_ref = weakref.ref(model)

    def init_all_workers_group(self, model_metadata: Metadata | None = None, **kwargs: Any) -> None:
        """Connect to the pool before the first update.

        Without this call, the first update connects. See
        ``SGLangCollectiveTransport.init_all_workers_group``.
        """
        transport = self._transport or self._scheme.create_transport()
        try:
            transport.init_all_workers_group(model_metadata)
        except BaseException:
            if transport is not self._transport:
                transport.shutdown()
            raise
        self._transport = transport

    def update_weights(self, weights: Any = None, *, version: int | None = None) -> Any:
        """Send the given weights or, without ``weights``, the weights of the registered model.

        Args:
            weights: a module, or a flat or nested TensorDict or dict. A TensorDict or dict may
                contain only some of the tensors.

        Returns:
            The ``UpdateReport``, or None for updates through files.

        Raises:
            RuntimeError: there is no model, or the sender is shut down.
        """
        if self._transport is None and self._ended:
            raise RuntimeError(
                "Transport not initialized: this sender is shut down. init_all_workers_group() "
                "connects it again"
            )
        partial = weights is not None and not isinstance(weights, torch.nn.Module)
        if weights is None:
            if self._model_ref is None:
                raise RuntimeError(
                    "No model registered and no weights provided. Call register_model() first or "
                    "provide weights explicitly."
                )
            weights = self._model_ref()
            if weights is None:
                raise RuntimeError(
                    "Model reference is no longer valid: nothing but register_model, whose "
                    "reference is weak, had the model. Keep one of your own"
                )
        if isinstance(weights, torch.nn.Module):
            weights = self._extract(weights)
        if self._transport is None:
            self.init_all_workers_group()
        report = self._transport.send_weights(
            "sglang_model", weights, partial=partial, version=version
        )
        for hook in self._post_hooks:
            hook()
        return report

    def _extract(self, model: torch.nn.Module) -> Any:
        if hasattr(model, "merge_and_unload"):
            # The engine's model needs merged adapters (PEFT). The trainer's model must not change.
            return copy.deepcopy(model).merge_and_unload().state_dict()
        if self._scheme.strategy_name == "state_dict":
            return model.state_dict()
        saved = model.state_dict(keep_vars=True).keys()
        tensors = flat(WeightStrategy(extract_as="tensordict").extract_weights(model))
        return {name: tensor for name, tensor in tensors.items() if name in saved}

    def flush_cache(self) -> bool:
        """Empty the replicas' prefix caches. This is not needed after an update."""
        flush = getattr(self._transport, "flush_cache", None)
        return flush is not None and bool(flush())

    def shutdown(self) -> None:
        """Disconnect."""
        self._ended = True
        if self._transport is not None:
            self._transport.shutdown()
            self._transport = None
        self._collectors.clear()
        self._post_hooks.clear()


class SGLangWeightReceiver:
    """Applies updates through files to an engine; see ``create_receiver``."""

    def __init__(self, scheme: SGLangWeightSyncScheme, engine: Any) -> None:
        engine = scheme.server_url if engine is None else engine
        if engine is None:
            raise ValueError("create_receiver needs the engine, or the scheme its server_url")
        self._scheme = scheme
        self._client, self._owned = client_of(engine, scheme)
        self._known = set(self._client.model_metadata())
        folder = scheme.local_addr
        self._folder = None if folder is None else FolderTransport(folder)

    def apply_weights(self, weights: Any, inplace: bool = True) -> UpdateReport:
        """Make weights live on all replicas. Tensors that are not given keep their values.

        Raises:
            ValueError: ``inplace`` is False. An engine has only one set of weights.
        """
        if not inplace:
            raise ValueError("Cannot apply weights out of place: an engine has one set of them")
        return update_pool(self._client, self._scheme, weights, self._known, partial=True)

    def poll_and_apply(self, timeout: float = 0.1) -> bool:
        """Apply the updates in the folder that were not applied before.

        Returns:
            Whether there was a new update. Without a folder, the result is always False, because
            the sender sends updates directly to the replicas.
        """
        folder = self._folder
        if folder is None:
            return False
        read = folder.read
        weights = folder.receive_weights()
        if weights is None:
            return False
        try:
            self.apply_weights(weights)
        except BaseException:
            # Let the next poll apply the same updates again.
            folder.read = read
            raise
        return True

    def shutdown(self) -> None:
        """Disconnect. The engine keeps running."""
        if self._owned:
            self._owned = False
            self._client.close()
