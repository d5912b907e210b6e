"""Weights for a worker on the sender's own GPU: it reads the sender's buckets through CUDA IPC.

NCCL refuses two ranks on one GPU, and there is nothing to send anyway. What crosses is a handle for
each bucket, as plain fields in msgpack, over the group's store; so is the going to and fro: a
reader takes a bucket when the sender has said it is filled, and the sender fills a bucket again
when every reader has said it has taken it. Every wait has the group's time-out, and an abort ends
it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from ..errors import WeightUpdateError
from ..wire.codec import encode


class _Handle(msgspec.Struct, array_like=True, frozen=True):
    """The fields of torch's ``UntypedStorage._share_cuda_``, and where in it the bucket is."""

    handle: bytes
    size: int
    offset: int
    counter: bytes
    counter_offset: int
    event: bytes
    sync: bool
    start: int
    nbytes: int


_handles = msgspec.msgpack.Decoder(_Handle)
_ABORTED = b"-"


class _Signals:
    """Keys in the store that one side sets and the other waits for."""

    def __init__(self, store: dist.TCPStore, prefix: str, timeout: float) -> None:
        prefix = f"{prefix}/shared"
        self._store = dist.PrefixStore(prefix, store.clone())
        # A connection that waits does nothing else meanwhile.
        self._other = dist.PrefixStore(prefix, store.clone())
        self._timeout = timedelta(seconds=timeout)
        self._lock = threading.Lock()
        self._awaited: str | None = None
        self.aborted = False

    def set(self, key: str, value: bytes = b"+") -> None:
        self._store.set(key, value)

    def wait(self, key: str) -> bytes:
        with self._lock:
            if self.aborted:
                raise WeightUpdateError("the update was given up")
            self._awaited = key
        try:
            self._store.wait([key], self._timeout)
            value: bytes = self._store.get(key)
        finally:
            with self._lock:
                self._awaited = None
        self._store.delete_key(key)
        if value == _ABORTED:
            raise WeightUpdateError("the update was given up")
        return value

    def abort(self) -> None:
        """End the wait under way, and every later one. From any thread."""
        with self._lock:
            self.aborted = True
            if self._awaited is not None:
                self._other.set(self._awaited, _ABORTED)


class SharedSender:
    """``readers`` workers on this GPU. ``ring``: buckets that may be on their way at a time."""

    def __init__(
        self, store: dist.TCPStore, prefix: str, readers: int, ring: int, timeout: float
    ) -> None:
        self.readers = readers
        self._ring = ring
        self._signals = _Signals(store, prefix, timeout)
        self._update = 0

    def begin(self, update: int) -> None:
        self._update = update

    def before(self, bucket: int) -> None:
        """Before the memory of bucket ``bucket - ring`` is filled again."""
        if bucket >= self._ring:
            self._taken(bucket - self._ring)

    def send(self, bucket: int, data: torch.Tensor) -> None:
        """Waits until the data is there, then tells the readers."""
        torch.cuda.current_stream(data.device).synchronize()
        storage: Any = data.untyped_storage()
        _, handle, size, offset, counter, counter_offset, event, sync = storage._share_cuda_()
        body = encode(
            _Handle(
                handle,
                size,
                offset,
                counter,
                counter_offset,
                event,
                sync,
                data.storage_offset(),
                data.numel(),
            )
        )
        for reader in range(self.readers):
            self._signals.set(f"{self._update}/{bucket}/{reader}/filled", body)

    def finish(self, buckets: int) -> None:
        """Wait until the readers have taken the last ones."""
        for bucket in range(max(0, buckets - self._ring), buckets):
            self._taken(bucket)

    def _taken(self, bucket: int) -> None:
        for reader in range(self.readers):
            self._signals.wait(f"{self._update}/{bucket}/{reader}/taken")

    def abort(self) -> None:
        self._signals.abort()


class SharedReader:
    """A worker's end on the same GPU."""

    def __init__(
        self, store: dist.TCPStore, prefix: str, reader: int, device: torch.device, timeout: float
    ) -> None:
        self._signals = _Signals(store, prefix, timeout)
        self._reader = reader
        self._device = device

    def receive(self, update: int, bucket: int, take: Callable[[torch.Tensor], None]) -> None:
        """Wait for the bucket and hand its bytes to ``take``, whose work on the current stream is
        awaited before the sender may fill the memory again."""
        key = f"{update}/{bucket}/{self._reader}"
        given = _handles.decode(self._signals.wait(f"{key}/filled"))
        new_shared: Any = torch.UntypedStorage._new_shared_cuda
        index = self._device.index or 0
        storage = new_shared(
            index,
            given.handle,
            given.size,
            given.offset,
            given.counter,
            given.counter_offset,
            given.event,
            given.sync,
        )
        data = torch.empty(0, dtype=torch.uint8, device=self._device)
        data.set_(storage, given.start, (given.nbytes,), (1,))
        take(data)
        torch.cuda.current_stream(self._device).synchronize()
        del data, storage
        self._signals.set(f"{key}/taken")

    def abort(self) -> None:
        self._signals.abort()
