"""Join a process group for weight updates. A trainer forms it in the same way as for SGLang.

The protocol follows ``init_custom_process_group`` and ``update_weights_from_distributed`` of SGLang
0.5.17. The keys in the store follow torch's ``_new_process_group_helper``. Rank 0 sends either one
broadcast for each tensor, or a single broadcast with the bytes of all tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from ..errors import InvalidRequest, WeightUpdateError
from ..wire.weights import TensorSpec
from .group import Group, local_address


class TrainerGroup:
    """One rank that receives. Only one thread at a time may call the methods, except ``abort``.

    The methods block.

    Args:
        backend: "nccl", or "gloo" for tensors on the CPU.
        gpu: the device for NCCL.
        address, port: the address and the port of the trainer's store.
        rank: the rank of this process. Rank 0 is the trainer.
        size: the number of ranks.
        timeout: time limit in seconds to form the group, and for all tensors of one ``receive``.

    Raises:
        InvalidRequest: the backend or the rank is wrong.
        WeightUpdateError: the group was not formed in time.
    """

    def __init__(
        self,
        backend: str,
        gpu: str,
        address: str,
        port: int,
        rank: int,
        size: int,
        name: str,
        timeout: float,
    ) -> None:
        if backend not in ("nccl", "gloo"):
            raise InvalidRequest(f"backend must be nccl or gloo, got {backend!r:.200}")
        if not 0 < rank < size:
            raise InvalidRequest(f"rank_offset must be in 1..{size - 1}, got {rank}")
        if backend == "nccl" and not torch.cuda.is_available():
            raise InvalidRequest("backend 'nccl' needs a GPU in the gateway's process: use 'gloo'")
        self._device = torch.device(gpu if backend == "nccl" else "cpu")
        try:
            store: dist.Store = dist.TCPStore(
                address, port, size, False, timedelta(seconds=timeout)
            )
            for prefix in (name, f"{name}/"):
                store = dist.PrefixStore(prefix, store)
            host = local_address(address, port)
            self._group = Group(
                store, f"{self._device.type}/", rank, size, self._device, host, timeout
            )
        except (RuntimeError, OSError) as error:
            raise WeightUpdateError(
                f"the group of {size} ranks at {address}:{port} was not formed: {error}"
            ) from error

    def receive(self, specs: Sequence[TensorSpec], *, flat: bool = False) -> dict[str, Any]:
        """Return the tensors that the trainer sends, by name, on the device of the group.

        Args:
            flat: whether one broadcast sends all tensors, as bytes one after another.

        Raises:
            InvalidRequest: a dtype is unknown, or there is no memory. Nothing was received.
            WeightUpdateError: the trainer is lost, or did not send the tensors in time. The
                group cannot be used any more.
        """
        types = [_dtype(spec.dtype) for spec in specs]
        sizes = [
            prod(spec.shape) * type_.itemsize for spec, type_ in zip(specs, types, strict=True)
        ]
        try:
            pieces = [
                torch.empty(size, dtype=torch.uint8, device=self._device)
                for size in ([sum(sizes)] if flat else sizes)
            ]
        except (RuntimeError, TypeError) as error:
            raise InvalidRequest(f"no memory for these tensors: {error}") from None
        if not flat:
            pieces = [
                piece.view(type_).view(spec.shape)
                for piece, type_, spec in zip(pieces, types, specs, strict=True)
            ]
        try:
            with self._group.deadline():
                for piece in pieces:
                    self._group.broadcast([piece]).wait()
                self._group.synchronize()
        except RuntimeError as error:
            self._group.abort()
            raise WeightUpdateError(f"the trainer's weights did not arrive: {error}") from error
        if flat:
            parts = zip(pieces[0].split(sizes), types, specs, strict=True)
            # Copy each part, because it may start at an address that is not aligned for its dtype.
            pieces = [part.clone().view(type_).view(spec.shape) for part, type_, spec in parts]
        return {spec.name: piece for spec, piece in zip(specs, pieces, strict=True)}

    def abort(self) -> None:
        """End a running ``receive``. Any thread may call this."""
        self._group.abort()

    def close(self) -> None:
        """Leave the group."""
        self._group.close()


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise InvalidRequest(f"torch has no dtype {name!r:.200}")
    return dtype
