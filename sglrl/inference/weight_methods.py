"""The methods of ``Client`` that update the engines' weights."""

from __future__ import annotations

import os
from typing import Any

from ..driver.driver import Driver
from ..driver.pool import Pool
from ..weights.local_sender import LocalSender, TensorMetadata
from ..weights.update_report import UpdateReport
from ..weights.update_request import UpdateRequest


class WeightMethods:
    """See ``Client``, which sets these attributes."""

    _pool: Pool
    _weights: LocalSender

    def _running(self, *, urgent: bool = False) -> Driver:
        raise NotImplementedError

    @property
    def weight_version(self) -> int:
        """Policy version of the workers' weights: 0 as loaded, then that of the last update."""
        return self._pool.weights.version

    @property
    def weights_address(self) -> str:
        """For ``sglrl.weights.Sender.connect`` in a trainer's process. It holds a secret."""
        self._running()
        return self._pool.weights.address

    async def update_weights(
        self,
        weights: Any,
        *,
        version: int | None = None,
        inflight: str = "continue",
        mode: str = "auto",
        partial: bool = False,
        bucket_bytes: int | None = None,
        timeout: float = 60.0,
        drain_timeout: float = 600.0,
        wait: bool = True,
        check_finite: bool = True,
        device: Any = None,
        host: str = "127.0.0.1",
    ) -> UpdateReport:
        """Give all workers new weights, while they go on generating.

        Either every worker has all of them when this returns, or it raises and every worker that
        serves has what it had. Tokens sampled before and after are told apart by
        ``Completion.versions``; KV cache is not shared between versions.

        Args:
            weights: a ``torch.nn.Module``, a mapping or TensorDict, or an iterable of (name,
                tensor), with Hugging Face names: those of the model's checkpoint, or of its module
                where transformers merges all experts of a layer into one tensor; on any device, in
                any float dtype. They are cast to the engine's dtype and DTensors are gathered here,
                on the sender. They must not change until this returns.
            version: a larger number than ``weight_version``; None: one more.
            inflight: what happens to running requests when the new weights become live:
                "continue": they go on, on the KV cache they have; "retract": they go on, and their
                KV cache is computed again with the new weights; "abort": they return what they
                have, with finish_reason "abort" (other calls, as with "retract", are computed again
                with the new weights); "drain": they are awaited first, and new ones
                wait from then on until the update has ended.
            mode: "full": staged beside the live weights, which takes as much GPU memory again (kept
                for the next update while 4 GiB are free);
                "bucketed": received piece by piece with the engine paused, into the live weights,
                so a worker that does not get all of it is ended; "auto": "full" where there is
                room.
            partial: tensors that are not given keep their values.
            bucket_bytes: tensors are sent in buckets of so many bytes, of which the sender holds
                two; None: 256 MB to 1 GB, by the size of the model.
            timeout: seconds from this call until the update must have begun. Another update, or the
                copy of the weights to a new worker, may be running until then. Afterwards a worker
                has as many seconds for each phase before the update is given up. (At least one for
                the commit, in which a worker that is late is killed.)
            drain_timeout: seconds that "drain" may take; then the update is given up.
            wait: wait for another update or copy that is running; False: raise
                ``UpdateInProgress`` at once.
            check_finite: refuse weights that hold NaN or infinite values, or values that overflow
                the engine's dtype. False: commit them as they are.
            device: the GPU (or "cpu") that sends; None: where the tensors are, else the current
                one.
            host: address of this process that the workers can reach.

        Raises:
            InvalidWeights: names, shapes or dtypes do not fit the model, there is no room, or some
                value is not finite. Every worker keeps its weights, with one exception: in mode
                "bucketed", a DTensor is gathered and checked after tensors before it were written.
            UpdateInProgress: another update or copy was still running when ``timeout`` had passed;
                nothing has begun.
            SettingsMismatch, UsageError: see ``sglrl.errors``.
            WeightUpdateError: it was given up.
            WorkerLost: no worker is left.
        """
        self._running()
        request = UpdateRequest(
            specs=[],
            version=version,
            inflight=inflight,
            mode=mode,
            partial=partial,
            bucket_bytes=bucket_bytes,
            timeout=timeout,
            drain_timeout=drain_timeout,
            wait=wait,
            check_finite=check_finite,
        )
        return await self._weights.update(weights, request, device=device, host=host)

    async def update_weights_from_disk(
        self,
        path: str | os.PathLike[str],
        *,
        version: int | None = None,
        inflight: str = "continue",
        partial: bool = False,
        timeout: float = 300.0,
        drain_timeout: float = 600.0,
        wait: bool = True,
        check_finite: bool = True,
    ) -> UpdateReport:
        """As ``update_weights``, from a folder of safetensors files that every worker reads itself:
        those that ``model.safetensors.index.json`` names, if there is one, else all. A worker that
        comes later reads them again, while they are what they were.

        Raises:
            ModelError: there are no such files.
        """
        self._running()
        request = UpdateRequest(
            specs=[],
            version=version,
            inflight=inflight,
            partial=partial,
            timeout=timeout,
            drain_timeout=drain_timeout,
            wait=wait,
            check_finite=check_finite,
        )
        return await self._weights.update_from_disk(path, request)

    async def connect_weights(
        self, *, device: Any = None, host: str = "127.0.0.1", timeout: float = 60.0
    ) -> float:
        """Form the group of this process and the workers now, so that the first update does not pay
        for it. Milliseconds that it took. ``launch(weight_device=...)`` does it at the start.

        Args:
            timeout: seconds from this call.

        Raises:
            UpdateInProgress: another update or copy was still running when ``timeout`` had passed.
            SettingsMismatch, WeightUpdateError, WorkerLost: as for ``update_weights``.
        """
        self._running()
        return await self._weights.connect(device, host, timeout)

    async def model_metadata(self, *, timeout: float = 60.0) -> dict[str, TensorMetadata]:
        """dtype and shape of every tensor that the loaded model takes, by Hugging Face name. The
        dtype is the one that the engine keeps it in.

        Args:
            timeout: seconds from this call until a worker must have answered.
        """
        self._running()
        found = await self._pool.weights.describe(timeout)
        return {spec.name: TensorMetadata(spec.dtype, spec.shape) for spec in found.tensors}

    async def verify_weights(self, weights: Any, *, timeout: float = 300.0) -> list[str]:
        """Names of those of the given tensors whose live values differ, on whatever worker, in any
        bit after the cast to the engine's dtype: [] when all is well. Compares checksums; no
        weights are sent.

        Args:
            timeout: seconds from this call until the workers must have answered. An update that is
                running is awaited.

        Raises:
            UpdateInProgress: another update or copy was still running when ``timeout`` had passed.
            InvalidWeights: names or shapes do not fit the model.
        """
        self._running()
        return await self._weights.verify(weights, timeout)
