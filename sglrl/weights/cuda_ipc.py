"""Send weights to a worker on the sender's GPU. The worker reads the buckets with CUDA IPC.

NCCL refuses two ranks on one GPU, and the data is already on that GPU. The sender passes only a
handle for each bucket, as plain fields in msgpack, through the group's store. The store also
carries two signals. The sender sets "filled" when a bucket is full, and each reader then reads the
bucket. A reader sets "taken" when it has read the bucket. The sender fills the memory again when
all readers have set "taken". Every wait has the group's timeout, and an abort ends every wait.
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
    """The fields of torch's ``UntypedStorage._share_cuda_``, and the bucket's place in the storage.

    Attributes:
        start: the offset of the bucket in the storage, in bytes.
        nbytes: the size of the bucket in bytes.
    """

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
        # ``abort`` uses this connection, because ``wait`` blocks the other connection.
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
        """End the current wait and every later wait. Any thread may call this."""
        with self._lock:
            self.aborted = True
            if self._awaited is not None:
                self._other.set(self._awaited, _ABORTED)


class SharedSender:
    """The sender's end of CUDA IPC, which passes buckets to the workers on its GPU.

    Args:
        prefix: the prefix of the group's keys in the store.
        readers: the number of workers on this GPU.
        ring: the maximum number of buckets in transfer at the same time.
        timeout: the maximum seconds of one wait.
    """

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
        """Wait until the memory of bucket ``bucket - ring`` can be filled with ``bucket``."""
        if bucket >= self._ring:
            self._taken(bucket - self._ring)

    def send(self, bucket: int, data: torch.Tensor) -> None:
        """Wait until the bucket is filled, then signal the readers."""
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
        """Wait until the readers have read the last buckets."""
        for bucket in range(max(0, buckets - self._ring), buckets):
            self._taken(bucket)

    def _taken(self, bucket: int) -> None:
        for reader in range(self.readers):
            self._signals.wait(f"{self._update}/{bucket}/{reader}/taken")

    def abort(self) -> None:
        self._signals.abort()


class SharedReader:
    """The reader's end of CUDA IPC, in a worker on the sender's GPU.

    Args:
        reader: the index of this worker among the readers.
        timeout: the maximum seconds of one wait.
    """

    def __init__(
        self, store: dist.TCPStore, prefix: str, reader: int, device: torch.device, timeout: float
    ) -> None:
        self._signals = _Signals(store, prefix, timeout)
        self._reader = reader
        self._device = device

    def receive(self, update: int, bucket: int, take: Callable[[torch.Tensor], None]) -> None:
        """Wait for a bucket, and call ``take`` with its bytes.

        The sender may fill the memory again when the work that ``take`` launched on the current
        stream has finished.
        """
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
