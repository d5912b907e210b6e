"""Weight updates directly into the memory of a pool's replicas."""

from __future__ import annotations

import logging
import os
from typing import Any, Final, Literal, Protocol

import torch

from ...api.blocking import BlockingClient, blocking
from ...weights.tensor_source import check_metadata
from ...weights.update_report import UpdateReport
from .tensor_names import Metadata, fitted, flat

logger = logging.getLogger("sglrl.integrations.torchrl")

PauseMode = Literal["abort", "retract", "in_place"]

INFLIGHT: Final = {"abort": "abort", "retract": "retract", "in_place": "continue"}


class Settings(Protocol):
    """The attributes of ``SGLangWeightSyncScheme`` that concern a pool; see there."""

    server_url: Any
    host: str | None
    device: torch.device | str | int | None
    pause_mode: PauseMode | None
    timeout: float
    check_finite: bool
    keys: str | os.PathLike[str] | None
    insecure: bool


class PoolTransport:
    """Sends weights directly into the replicas' memory, over NCCL (gloo on CPU)."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._client: BlockingClient | None = None
        self._owned = False
        self._known: set[str] = set()

    def init_all_workers_group(self, model_metadata: Metadata | None = None) -> None:
        """Connect to the pool.

        Args:
            model_metadata: name -> (dtype, shape) of the tensors that will be sent. They are
                checked now.

        Raises:
            ValueError: the model has no tensor of this name and shape, or the dtype is not
                floating-point. Floating-point tensors are cast to the engine's dtype.
        """
        settings = self._settings
        if self._client is None:
            self._client, self._owned = client_of(settings.server_url, settings)
        client = self._client
        wanted = client._wait(client._client._pool.weights.describe(settings.timeout))
        self._known = {spec.name for spec in wanted.tensors}
        if model_metadata:
            check_metadata(fitted(flat(dict(model_metadata)), self._known), wanted)
        if not self._owned:
            self._client.connect_weights(device=_device(settings, self._client), **self._hosted())

    def _hosted(self) -> dict[str, str]:
        host = self._settings.host
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
            self._settings,
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
        """Return whether ``init_all_workers_group`` was called."""
        return self._client is not None

    def shutdown(self) -> None:
        """Disconnect. The pool keeps running."""
        client, self._client = self._client, None
        if client is not None and self._owned:
            client.close()


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
        known: names of the engine's tensors.
        options: more arguments of ``client.update_weights``.
    """
    return client.update_weights(
        fitted(flat(weights), known),
        inflight=INFLIGHT[settings.pause_mode or "retract"],
        timeout=settings.timeout,
        check_finite=settings.check_finite,
        device=_device(settings, client),
        **options,
    )


def _device(settings: Settings, client: BlockingClient) -> torch.device | str | None:
    device = settings.device
    if isinstance(device, int):
        return "cpu" if client.info.device == "cpu" else f"cuda:{device}"
    return device
