"""Weight updates directly into the memory of a pool's replicas."""

from __future__ import annotations

import os
from typing import Any, Protocol

import torch

from ...launching.blocking import BlockingClient, blocking
from ...weights.tensor_source import check_metadata
from ...weights.update_report import UpdateReport
from .environment import INFLIGHT, PauseMode, logger, pause_mode
from .tensor_names import Metadata, fitted, flat


class Settings(Protocol):
    """The attributes of ``SGLangWeightSyncScheme`` that concern a pool."""

    server_url: Any
    device: torch.device | str | int | None
    pause_mode: PauseMode | None
    timeout: float
    check_finite: bool
    keys: str | os.PathLike[str] | None
    insecure: bool


class SGLangCollectiveTransport:
    """Sends weights directly into the replicas' memory, over NCCL (gloo on CPU).

    ``SGLangWeightSyncScheme.create_transport`` makes this object.

    Args:
        rank: the rank of this process among the trainer's processes. Only rank 0 may send.
        world_size: accepted, but not used, because the pool reports its number of GPUs.

    The other arguments are the same as for ``SGLangWeightSyncScheme``. ``device=None`` is GPU 0.

    Raises:
        ValueError: an argument is invalid, see ``SGLangWeightSyncScheme``.
    """

    def __init__(
        self,
        server_url: Any,
        master_address: str | None = None,
        master_port: int | None = None,
        rank: int = 0,
        world_size: int | None = None,
        device: torch.device | str | int | None = None,
        timeout: float = 300.0,
        flush_cache_on_update: bool | None = None,
        pause_mode: PauseMode | None = None,
        *,
        check_finite: bool = True,
        keys: str | os.PathLike[str] | None = None,
        insecure: bool = False,
    ) -> None:
        check_pause(pause_mode, flush_cache_on_update)
        self.server_url = server_url.rstrip("/") if isinstance(server_url, str) else server_url
        self.master_address = master_address
        self.master_port = master_port
        self.rank = rank
        self.world_size = world_size
        self.device = _gpu(device)
        self.timeout = timeout
        self.flush_cache_on_update = flush_cache_on_update
        self.pause_mode = pause_mode
        self.check_finite = check_finite
        self.keys = keys
        self.insecure = insecure
        self._client: BlockingClient | None = None
        self._owned = False
        self._known: set[str] = set()

    def init_all_workers_group(self, model_metadata: Metadata | None = None) -> None:
        """Connect to the pool.

        Args:
            model_metadata: the dtype and shape, by name, of the tensors that will be sent. This
                method checks them.

        Raises:
            RuntimeError: this process is not rank 0.
            ValueError: the model has no tensor of a given name and shape, or a dtype is not
                floating-point. Floating-point tensors are cast to the engine's dtype.
        """
        if self.rank:
            raise RuntimeError(f"Only rank 0 sends weights, and this is rank {self.rank}")
        if self._client is None:
            self._client, self._owned = client_of(self.server_url, self)
        client = self._client
        wanted = client.wait(client.source.pool.weights.describe(self.timeout))
        self._known = {spec.name for spec in wanted.tensors}
        if model_metadata:
            check_metadata(fitted(flat(dict(model_metadata)), self._known), wanted)
        if not self._owned:
            self._client.connect_weights(device=_device(self, self._client), **self._hosted())

    def _hosted(self) -> dict[str, str]:
        host = self.master_address
        return {} if host is None else {"host": host}

    def send_weights(
        self, model_id: str, weights: Any, *, partial: bool = False, version: int | None = None
    ) -> UpdateReport:
        """Make the weights live on all replicas.

        Raises:
            RuntimeError: ``init_all_workers_group`` was not called.
            sglrl.InvalidWeights: the weights do not fit the model.
            sglrl.WeightUpdateError: the update was abandoned. No weights have changed.
        """
        if self._client is None:
            raise RuntimeError(
                "Communication group not initialized. Call init_all_workers_group first."
            )
        report = update_pool(
            self._client,
            self,
            weights,
            self._known,
            partial=partial,
            version=version,
            **self._hosted(),
        )
        logger.info("%s: %s", model_id, report)
        return report

    def flush_cache(self) -> bool:
        return self._client is not None and self._client.flush_cache()

    def check_connection(self) -> bool:
        """Return whether ``init_all_workers_group`` was called, and ``shutdown`` was not."""
        return self._client is not None

    def shutdown(self) -> None:
        """Disconnect. The pool keeps running."""
        client, self._client = self._client, None
        if client is not None and self._owned:
            client.close()


def check_pause(mode: PauseMode | None, flush_cache_on_update: bool | None) -> None:
    """Check a pause mode.

    Raises:
        ValueError: ``mode`` is not a pause mode, or ``flush_cache_on_update`` is True and
            ``mode`` is neither None nor "abort". In other modes requests keep their KV cache.
    """
    if mode is not None and mode not in INFLIGHT:
        raise ValueError(f"pause_mode must be one of {set(INFLIGHT)}, got {mode!r}")
    if flush_cache_on_update and mode not in (None, "abort"):
        raise ValueError(
            "flush_cache_on_update=True requires pause_mode='abort': the others keep requests, "
            "and what they have cached"
        )


def client_of(pool: Any, settings: Settings) -> tuple[BlockingClient, bool]:
    """Return the client of a pool, and whether the caller must close it."""
    if isinstance(pool, str):
        client = blocking.connect(pool, keys=settings.keys, insecure=settings.insecure)
        return client.__enter__(), True
    return getattr(pool, "client", pool), False


def update_pool(
    client: BlockingClient, settings: Settings, weights: Any, known: set[str], **options: Any
) -> UpdateReport:
    """Make weights live on all replicas.

    Args:
        known: the names of the engine's tensors.
        options: other arguments of ``client.update_weights``.
    """
    return client.update_weights(
        fitted(flat(weights), known),
        inflight=INFLIGHT[settings.pause_mode or pause_mode()],
        timeout=settings.timeout,
        check_finite=settings.check_finite,
        device=_device(settings, client),
        **options,
    )


def _gpu(device: torch.device | str | int | None) -> torch.device | str | int:
    """Return the index of the GPU if the device is a GPU, or any other device unchanged."""
    if device is None or str(device) == "cuda":
        return 0
    kind, _, index = str(device).partition(":")
    return int(index) if kind == "cuda" else device


def _device(settings: Settings, client: BlockingClient) -> torch.device | str | None:
    device = settings.device
    if isinstance(device, int):
        return "cpu" if client.info.device == "cpu" else f"cuda:{device}"
    return device
