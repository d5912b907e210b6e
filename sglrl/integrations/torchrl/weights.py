"""TorchRL's ``SGLangWeightSyncScheme`` over the weight channel of an sglrl pool.

An update is staged while generation goes on, becomes live on every replica or on none, and has a
version that every token sampled with it carries.
"""

from __future__ import annotations

import copy
import logging
import os
import secrets
import shutil
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.modules.llm.backends.sglang.sglang_utils import get_local_ip_address, get_open_port
from torchrl.weight_update.llm import get_sglang_model_metadata as _of_module
from torchrl.weight_update.weight_sync_schemes import WeightStrategy, WeightSyncScheme

from ...api.blocking import BlockingClient, blocking
from ...weights.tensor_source import check_metadata
from ...weights.update_report import UpdateReport

logger = logging.getLogger("sglrl.integrations.torchrl")

Metadata = Mapping[str, tuple[torch.dtype, torch.Size]]
PauseMode = Literal["abort", "retract", "in_place"]

_INFLIGHT: Final = {"abort": "abort", "retract": "retract", "in_place": "continue"}
_DERIVED: Final = ("inv_freq", "original_inv_freq")
"""Buffers that no checkpoint holds: a model works them out when it is made. TensorDicts of modules
have them."""
_LATEST: Final = "latest"


def get_sglang_model_metadata(model: Any) -> dict[str, tuple[torch.dtype, torch.Size]]:
    """dtype and shape by name: of a module's tensors, adapters (PEFT) merged; of an
    ``AsyncSGLang``, of what its engines take."""
    of_service = getattr(model, "get_model_metadata", None)
    return dict(_of_module(model) if of_service is None else of_service())


class SGLangWeightSyncScheme(WeightSyncScheme):  # type: ignore[misc]
    """How a trainer's weights get into the replicas.

    ::

        scheme = SGLangWeightSyncScheme(service.server_url)
        sender = scheme.create_sender()
        sender.register_model(model)
        sender.init_all_workers_group(get_sglang_model_metadata(model))  # or with the first update
        sender.update_weights()

    Args:
        server_url: the pool's address (``service.server_url``, ``client.address``); in the process
            that has the pool, better the ``AsyncSGLang`` or ``BlockingClient`` itself.
        master_address: of this process, as the replicas can reach it; None: they are on this
            machine.
        master_port: accepted; the weight channel chooses its own.
        num_gpus: accepted; the pool knows how many there are.
        strategy: "tensordict" or "state_dict": how weights are taken from a model.
        device: that sends; an integer is a GPU, or the CPU if the engines run there.
        flush_cache_on_update: accepted. What was cached under old weights is never used with new
            ones.
        pause_mode: what becomes of running requests: "retract" (None): they go on, their KV cache
            computed anew; "in_place": they go on with the KV cache that they have; "abort": they
            return what they have.
        timeout: seconds that a replica may take for any phase.
        check_finite: as for ``Client.update_weights``.
        keys, insecure: as for ``sglrl.connect``.
        remote_addr: a folder: then updates are written there as memory-mapped tensordicts, and
            receivers apply them (``create_receiver``).
        local_addr: the same folder where a receiver runs; None: ``remote_addr``.
        num_threads: that write the files.

    Raises:
        ValueError: an argument is unknown, or ``flush_cache_on_update`` is asked for with a
            ``pause_mode`` under which TorchRL's cannot flush.
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
        if pause_mode is not None and pause_mode not in _INFLIGHT:
            raise ValueError(f"pause_mode must be one of {set(_INFLIGHT)}, got {pause_mode!r}")
        if flush_cache_on_update and pause_mode not in (None, "abort"):
            raise ValueError(
                "flush_cache_on_update=True requires pause_mode='abort': the others keep requests, "
                "and what they have cached"
            )
        if strategy not in ("tensordict", "state_dict"):
            raise ValueError(f"strategy must be 'tensordict' or 'state_dict', got {strategy!r}")
        if server_url is None and remote_addr is None:
            raise ValueError("give server_url, or remote_addr for updates through files")
        self.server_url = server_url.rstrip("/") if isinstance(server_url, str) else server_url
        self._host = master_address
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
        """The trainer and ``num_gpus`` others."""
        return 1 + self.num_gpus

    def create_transport(self, **kwargs: Any) -> PoolTransport | FolderTransport:
        """What a sender sends with."""
        if self.remote_addr is not None:
            return FolderTransport(self.remote_addr, self.num_threads)
        return PoolTransport(self)

    def create_sender(self) -> SGLangWeightSender:
        """For the trainer's process; of several ranks, for the first.

        Raises:
            ValueError: ``server_url`` is no address of a pool.
            TypeError: it is neither an address nor a service or client.
        """
        if isinstance(self.server_url, str):
            # Not entered: it checks what it is given.
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
        """For updates through files: applies them to ``engine`` (an ``AsyncSGLang``, a
        ``BlockingClient`` or an address). Otherwise the replicas themselves receive: None. Other
        arguments are accepted, as by TorchRL's."""
        if engine is None and self.remote_addr is None:
            return None
        return SGLangWeightReceiver(self, engine)


class PoolTransport:
    """Straight into the replicas' memory, over NCCL (gloo on CPU)."""

    def __init__(self, scheme: SGLangWeightSyncScheme) -> None:
        self._scheme = scheme
        self._client: BlockingClient | None = None
        self._owned = False
        self._known: set[str] = set()

    def init_all_workers_group(self, model_metadata: Metadata | None = None) -> None:
        """Connect to the pool.

        Args:
            model_metadata: name -> (dtype, shape) of what will be sent, to be checked now.

        Raises:
            ValueError: the model has no tensor of such a name and shape, or the dtype is of no
                floating-point numbers, which are cast to the engine's.
        """
        scheme = self._scheme
        if self._client is None:
            self._client, self._owned = _client_of(scheme.server_url, scheme)
        client = self._client
        wanted = client._wait(client._client._pool.weights.describe(scheme.timeout))
        self._known = {spec.name for spec in wanted.tensors}
        if model_metadata:
            check_metadata(_fitted(_flat(dict(model_metadata)), self._known), wanted)
        if not self._owned:
            self._client.connect_weights(device=_device(scheme, self._client), **self._hosted())

    def _hosted(self) -> dict[str, str]:
        host = self._scheme._host
        return {} if host is None else {"host": host}

    def send_weights(
        self, model_id: str, weights: Any, *, partial: bool = False, version: int | None = None
    ) -> UpdateReport:
        """Make the weights live on all replicas.

        Raises:
            RuntimeError: ``init_all_workers_group`` was not called.
            sglrl.InvalidWeights: they do not fit the model.
            sglrl.WeightUpdateError: it was given up; nothing has changed.
        """
        if self._client is None:
            raise RuntimeError(
                "Communication group not initialized. Call init_all_workers_group first."
            )
        scheme = self._scheme
        report = self._client.update_weights(
            _fitted(_flat(weights), self._known),
            version=version,
            inflight=_INFLIGHT[scheme.pause_mode or "retract"],
            partial=partial,
            timeout=scheme.timeout,
            check_finite=scheme.check_finite,
            device=_device(scheme, self._client),
            **self._hosted(),
        )
        logger.info("%s: %s", model_id, report)
        return report

    def flush_cache(self) -> bool:
        return self._client is not None and self._client.flush_cache()

    def check_connection(self) -> bool:
        """Whether ``init_all_workers_group`` was called."""
        return self._client is not None

    def shutdown(self) -> None:
        """Disconnect. The pool goes on."""
        client, self._client = self._client, None
        if client is not None and self._owned:
            client.close()


class _Latest(msgspec.Struct):
    """``number``: of the last update; 0: there is none. ``tensors``: by name, the update that has
    the value. ``series``: in which updates are numbered; another one when the folder was begun
    anew."""

    number: int
    tensors: dict[str, int]
    series: str = ""


class FolderTransport:
    """Memory-mapped tensordicts in a folder: update n in folder ``n``, and the file ``latest``:
    JSON of n, and for every tensor the update that it is of. That file is replaced when an update
    is whole, so a reader never has half of one; and a reader that comes late finds what all the
    updates between brought, be they of a part. A folder is kept while the last file or the one
    before names it."""

    def __init__(self, folder: str | os.PathLike[str], num_threads: int = 1) -> None:
        self.folder = Path(folder)
        self.num_threads = num_threads
        self.read = 0
        """The last update that was received here."""
        self._series = ""
        """Of which series it is."""

    def init_all_workers_group(self, model_metadata: Metadata | None = None) -> None:
        """There is no group."""

    def send_weights(
        self, model_id: str, weights: Any, *, partial: bool = False, version: int | None = None
    ) -> None:
        """Write them. (What is left out keeps its value where they are applied.)"""
        self.folder.mkdir(parents=True, exist_ok=True)
        before = self._latest()
        number = before.number + 1
        target = self.folder / str(number)
        shutil.rmtree(target, ignore_errors=True)
        tensors = {name: tensor.detach().cpu() for name, tensor in _flat(weights).items()}
        whole = TensorDict(tensors, batch_size=[]).unflatten_keys(".")
        whole.memmap(str(target), copy_existing=True, num_threads=self.num_threads)
        now = _Latest(
            number,
            (before.tensors if partial else {}) | dict.fromkeys(tensors, number),
            before.series or secrets.token_hex(8),
        )
        marker = self.folder / f"{_LATEST}.new"
        marker.write_bytes(msgspec.json.encode(now))
        marker.replace(self.folder / _LATEST)
        kept = {*now.tensors.values(), *before.tensors.values()}
        for folder in self.folder.iterdir():
            if folder.name.isdecimal() and int(folder.name) not in kept:
                shutil.rmtree(folder, ignore_errors=True)

    def receive_weights(self, timeout: float | None = None, **kwargs: Any) -> Any:
        """What has come since this was last asked, by flat name; None: nothing."""
        latest = self._latest()
        while (latest.series, latest.number) != (self._series, self.read):
            if latest.series != self._series:
                self._series, self.read = latest.series, 0
            since = {n for n in latest.tensors.values() if n > self.read}
            try:
                folders = {
                    n: TensorDict.load_memmap(str(self.folder / str(n))).flatten_keys(".")
                    for n in since
                }
                found = {name: folders[n][name] for name, n in latest.tensors.items() if n in since}
            except (OSError, RuntimeError):
                # Two updates came meanwhile, so another file names other folders.
                again = self._latest()
                if again.number == latest.number:
                    raise
                latest = again
                continue
            self.read = latest.number
            return found
        return None

    def _latest(self) -> _Latest:
        try:
            return msgspec.json.decode((self.folder / _LATEST).read_bytes(), type=_Latest)
        except FileNotFoundError:
            return _Latest(0, {})

    def check_connection(self) -> bool:
        return True

    def shutdown(self) -> None:
        """Nothing is open."""


class SGLangWeightSender:
    """The trainer's end of a scheme."""

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
        """``collector.increment_version()`` is called after every update."""
        self._collectors.append(collector)
        if not self._post_hooks:
            self._post_hooks.append(self._increment_versions)

    def _increment_versions(self) -> None:
        for collector in self._collectors:
            try:
                collector.increment_version()
            except Exception as error:
                # The weights are live; a collector that is gone changes nothing about that.
                logger.warning("a collector could not increment its version: %s", error)

    def register_model(self, model: Any) -> None:
        """What ``update_weights`` sends. The reference is weak: the program keeps the model."""
        self._model_ref = weakref.ref(model)

    def init_all_workers_group(self, model_metadata: Metadata | None = None, **kwargs: Any) -> None:
        """Connect to the pool ahead of the first update, which would do it otherwise; see
        ``PoolTransport.init_all_workers_group``."""
        transport = self._transport or self._scheme.create_transport()
        try:
            transport.init_all_workers_group(model_metadata)
        except BaseException:
            if transport is not self._transport:
                transport.shutdown()
            raise
        self._transport = transport

    def update_weights(self, weights: Any = None, *, version: int | None = None) -> Any:
        """Send the registered model's weights, or those given, which may be a part: a TensorDict,
        a dict (flat or nested) or a module. The ``UpdateReport``; through files, None.

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
            # Adapters (PEFT): as the engine's model has them, merged, and not in the trainer's.
            return copy.deepcopy(model).merge_and_unload().state_dict()
        if self._scheme.strategy_name == "state_dict":
            return model.state_dict()
        saved = model.state_dict(keep_vars=True).keys()
        found = _flat(WeightStrategy(extract_as="tensordict").extract_weights(model))
        return {name: tensor for name, tensor in found.items() if name in saved}

    def flush_cache(self) -> bool:
        """Empty the replicas' prefix caches. An update needs none."""
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
    """Applies updates that come through files to an engine; see ``create_receiver``."""

    def __init__(self, scheme: SGLangWeightSyncScheme, engine: Any) -> None:
        engine = scheme.server_url if engine is None else engine
        if engine is None:
            raise ValueError("create_receiver needs the engine, or the scheme its server_url")
        self._scheme = scheme
        self._client, self._owned = _client_of(engine, scheme)
        self._known = set(self._client.model_metadata())
        folder = scheme.local_addr
        self._folder = None if folder is None else FolderTransport(folder)

    def apply_weights(self, weights: Any, inplace: bool = True) -> UpdateReport:
        """Make them live on all replicas. What is left out keeps its value.

        Raises:
            ValueError: ``inplace`` is False: an engine has one set of weights.
        """
        if not inplace:
            raise ValueError("Cannot apply weights out of place: an engine has one set of them")
        return self._client.update_weights(
            _fitted(_flat(weights), self._known),
            partial=True,
            inflight=_INFLIGHT[self._scheme.pause_mode or "retract"],
            timeout=self._scheme.timeout,
            check_finite=self._scheme.check_finite,
            device=_device(self._scheme, self._client),
        )

    def poll_and_apply(self, timeout: float = 0.1) -> bool:
        """Apply what the folder has that was not applied before; False if that is nothing. Without
        a folder the sender pushes, so there is nothing to poll: False."""
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
            # So that they come again with the next poll.
            folder.read = read
            raise
        return True

    def shutdown(self) -> None:
        """Disconnect. The engine goes on."""
        if self._owned:
            self._owned = False
            self._client.close()


def _client_of(pool: Any, scheme: SGLangWeightSyncScheme) -> tuple[BlockingClient, bool]:
    """And whether it is to be closed by us."""
    if isinstance(pool, str):
        client = blocking.connect(pool, keys=scheme.keys, insecure=scheme.insecure)
        return client.__enter__(), True
    return getattr(pool, "client", pool), False


def _device(scheme: SGLangWeightSyncScheme, client: BlockingClient) -> torch.device | str | None:
    device = scheme.device
    if isinstance(device, int):
        return "cpu" if client.info.device == "cpu" else f"cuda:{device}"
    return device


def _flat(weights: Any) -> dict[str, Any]:
    """Tensors by dotted name."""
    if isinstance(weights, Mapping) and any(isinstance(v, Mapping) for v in weights.values()):
        weights = TensorDict(dict(weights), batch_size=[])
    if isinstance(weights, TensorDictBase):
        weights = weights.flatten_keys(".")
    return {
        name: tensor
        for name, tensor in weights.items()
        if name.rpartition(".")[2] not in _DERIVED and not name.startswith("__extra_state__")
    }


def _fitted(named: dict[str, Any], known: set[str]) -> dict[str, Any]:
    """With the engine's names: TorchRL's modules may hold the model as ``module.0.model`` or so,
    which is the same in front of every name."""
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
