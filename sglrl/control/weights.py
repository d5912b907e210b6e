"""The methods of ``Client`` that update the engines' weights."""

from __future__ import annotations

import os
from typing import Any, Unpack

from ..errors import UsageError
from ..weights.local_sender import LocalSender, TensorMetadata
from ..weights.update_report import UpdateReport
from ..weights.update_request import UpdateOptions, UpdateRequest
from ..weights.update_span import traced_update
from ..weights.verification import differing_tensors
from ..wire.weights import ModelDescription, Shard
from .adapters import PoolAdapters
from .client_base import ClientBase
from .operations import operation


class WeightMethods(ClientBase):
    """The methods of ``Client`` that update and compare weights."""

    @property
    def weight_version(self) -> int:
        """The workers' policy version: 0 after loading, then the version of the last update."""
        return self.pool.weights.version

    @property
    def weights_address(self) -> str:
        """The address for ``sglrl.weights.Sender.connect`` in a trainer. It contains a secret."""
        self._running()
        return self.pool.weights.address

    async def update_weights(
        self,
        weights: Any,
        *,
        device: Any = None,
        host: str | None = None,
        lora: str | None = None,
        config: Any = None,
        **options: Unpack[UpdateOptions],
    ) -> UpdateReport:
        """Update the weights of all workers while they continue to generate.

        When this returns, every worker has all new weights. When it raises, every worker that
        serves keeps its old weights. ``Completion.versions`` separates tokens sampled before the
        update from tokens sampled after it. Two versions never share KV cache.

        Args:
            weights: a ``torch.nn.Module``, a mapping or TensorDict, or an iterable of (name,
                tensor). The names are Hugging Face names: the names in the model's checkpoint.
                Where transformers merges all experts of a layer into one tensor, the name of this
                tensor in the module is allowed too. The tensors may be on any device and in any
                float dtype. This process, the sender, casts them to the engine's dtype and gathers
                DTensors. The tensors must not change until this returns.
            device: the GPU (or "cpu") that sends. None: the GPU of the tensors, or the current GPU
                if no tensor is on one. With workers on CPU, None is "cpu".
            host: an address of this process that the workers can reach. None: "127.0.0.1", or with
                ``launch(hosts=...)`` the address of this machine that the hosts connect to.
            lora: the name of a LoRA adapter to replace instead of the model's weights. ``weights``
                is then an adapter as for ``load_lora``, and ``version`` is the adapter's own
                version (``Completion.lora_versions``). Running requests continue with the new
                adapter.
                ``inflight`` is "continue", "retract" or "abort". Only the requests of this adapter
                are aborted. ``mode``, ``partial``, ``same_version``, ``bucket_bytes``,
                ``drain_timeout``, ``device`` and ``host`` must have their defaults.
            config: the configuration of the adapter, as for ``load_lora``. None: keep the rank and
                the scaling of the adapter.

        Keyword Args:
            version: a number larger than ``weight_version``. None: ``weight_version`` plus one.
            inflight: the treatment of running requests when the new weights become live.
                "continue", the default: requests continue with their present KV cache.
                "retract": requests continue, and their KV cache is recomputed with the new weights.
                "abort": ``generate`` calls return their tokens so far, with finish_reason "abort".
                Other calls are recomputed with the new weights, as with "retract".
                "drain": the update waits until running requests have finished. New requests wait
                until the update has finished.
            mode: "full": workers stage the new weights beside the live weights. This needs GPU
                memory for the weights twice. The memory is kept for the next update while 4 GiB are
                free. "bucketed": workers pause the engine and receive the weights piece by piece
                into the live weights. A worker that does not receive all pieces is killed. "auto",
                the default: "full" if there is enough memory, else "bucketed".
            partial: allow missing tensors. Missing tensors keep their values. False by default.
            same_version: this call sends a further part of the last update, so the version stays
                the same. An update in five parts is one version, for ``max_staleness`` too, if its
                last four parts have ``same_version=True``. Needs ``partial=True``. Two parts never
                share KV cache. A worker that missed a part gets the weights of another worker.
            bucket_bytes: bytes per bucket in which tensors are sent. The sender holds two buckets.
                None: 256 MB to 1 GB, depending on the size of the model.
            timeout: seconds (60) from this call until the update must have begun. Until then
                another update, or the copy of the weights to a new worker, may be running. After
                that, each worker has ``timeout`` seconds for each phase, then the update fails. The
                commit has at least one second, and a worker that is late in the commit is killed.
            drain_timeout: seconds (600) that "drain" may take. After that, the update fails.
            wait: True, the default: wait for another running update or copy. False: raise
                ``UpdateInProgress`` at once.
            check_finite: True, the default: reject weights that contain NaN or infinite values, or
                values that overflow the engine's dtype. False: commit the weights unchecked.

        Raises:
            InvalidWeights: names, shapes or dtypes do not fit the model, there is not enough
                memory, or a value is not finite. Every worker keeps its weights, with one
                exception: in mode "bucketed", a DTensor is checked only after the tensors before it
                were written. If it is not finite, workers with some new tensors are killed.
            UpdateInProgress: another update or copy was still running after ``timeout`` seconds.
                This update has not begun.
            SettingsMismatch, UsageError: see ``sglrl.errors``.
            WeightUpdateError: the update failed.
            WorkerLost: no worker is left.
        """
        self._running()
        request = UpdateRequest.of(options)
        if lora is None:
            if config is not None:
                raise UsageError("config= is for an adapter: give its name with lora=")
            return await traced_update(
                self._control.sender.update(weights, request, device=device, host=host)
            )
        parts = request.mode, request.partial, request.same_version, request.bucket_bytes
        unused = (*parts, request.drain_timeout, device, host)
        if unused != ("auto", False, False, None, 600.0, None, None):
            raise UsageError(
                "mode, partial, same_version, bucket_bytes, drain_timeout, device and host are not "
                "for lora="
            )
        if not self._control.is_local:
            raise UsageError("adapters are replaced by the process that launched the pool")
        adapters = self._control.part(PoolAdapters)
        return await traced_update(adapters.replace(lora, weights, config, request))

    @operation
    async def update_weights_from_disk(
        self,
        path: str | os.PathLike[str],
        *,
        version: int | None = None,
        inflight: str = "continue",
        partial: bool = False,
        same_version: bool = False,
        timeout: float = 300.0,
        drain_timeout: float = 600.0,
        wait: bool = True,
        check_finite: bool = True,
    ) -> UpdateReport:
        """Update the weights from a folder of safetensors files, as ``update_weights`` does.

        Every worker reads the files itself: the files named by ``model.safetensors.index.json`` if
        it exists, else all files. A worker that starts later reads the files again if they have not
        changed.

        Raises:
            ModelError: the folder has no such files.
        """
        request = UpdateRequest(
            specs=[],
            version=version,
            inflight=inflight,
            partial=partial,
            same_version=same_version,
            timeout=timeout,
            drain_timeout=drain_timeout,
            wait=wait,
            check_finite=check_finite,
        )
        sender = self._control.part(LocalSender)
        return await traced_update(sender.update_from_disk(path, request))

    async def connect_weights(
        self, *, device: Any = None, host: str | None = None, timeout: float = 60.0
    ) -> float:
        """Connect this process with the workers now, so that the first update is faster.

        This forms the process group of the sender and the workers. ``launch(weight_device=...)``
        forms the group when the pool starts.

        Args:
            timeout: seconds from this call until the connection must be made.

        Returns:
            The milliseconds that the connection took.

        Raises:
            UpdateInProgress: another update or copy was still running after ``timeout`` seconds.
            SettingsMismatch, WeightUpdateError, WorkerLost: as for ``update_weights``.
        """
        self._running()
        return await self._control.sender.connect(device, host, timeout)

    async def model_metadata(self, *, timeout: float = 60.0) -> dict[str, TensorMetadata]:
        """Return dtype and shape of every tensor of the loaded model, by Hugging Face name.

        The dtype is the engine's dtype of the tensor.

        Args:
            timeout: seconds from this call until a worker must have answered.
        """
        self._running()
        model = await self.pool.weights.describe(timeout)
        return {spec.name: TensorMetadata(spec.dtype, spec.shape) for spec in model.tensors}

    async def verify_weights(self, weights: Any, *, timeout: float = 300.0) -> list[str]:
        """Compare the given tensors with the live weights of every worker.

        The tensors are cast to the engine's dtype, then compared by checksum. No weights are sent.

        Args:
            weights: as for ``update_weights``.
            timeout: seconds from this call until the workers must have answered. A running update
                is awaited first.

        Returns:
            The names of the tensors that differ in any bit on any worker. Empty if all are equal.

        Raises:
            UpdateInProgress: another update or copy was still running after ``timeout`` seconds.
            InvalidWeights: names or shapes do not fit the model.
        """
        self._running()
        return await differing_tensors(self.pool.weights, weights, timeout)

    @operation
    async def _describe(self, *, timeout: float | None) -> ModelDescription:
        return await self.pool.weights.describe(timeout)

    @operation
    async def _checksums(
        self, names: list[str], *, timeout: float | None
    ) -> list[tuple[tuple[int, int], list[Shard]]]:
        return [*(await self.pool.weights.checksums(names, timeout)).items()]
