"""Process groups of the weight channel, separate from the other groups of the process.

Each group has its own store, and is never registered with ``torch.distributed``. Therefore the
groups of a trainer are not touched.

Every wait has a deadline. NCCL kernels have no deadline, so a timer aborts the group
(``ncclCommAbort``). The abort ends the kernels, and ``Group`` then raises an error. gloo operations
have time limits themselves.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..config import nccl_environment
from ..errors import UsageError, WeightUpdateError
from ..wire.weights import RankSettings

# Settings of torch's NCCL backend. By default, a late operation makes it kill the whole process.
_QUIET = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
}


def settings(device: torch.device, host: str = "", port: int = 0) -> RankSettings:
    """Return the settings of this process. They are compared before a group is formed."""
    uuid = nccl = ""
    if device.type == "cuda":
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return RankSettings(
        device=device.type,
        uuid=uuid,
        torch=str(torch.__version__),
        nccl=nccl,
        environment=nccl_environment(),
        host=host,
        port=port,
    )


class Store:
    """The sender's TCPStore, which listens on only one address.

    Raises:
        UsageError: ``host`` is not an address of this machine.
    """

    def __init__(self, host: str = "127.0.0.1", timeout: float = 60.0) -> None:
        if not isinstance(host, str) or not host:
            raise UsageError(f"host must be an address of this machine, got {host!r}")
        try:
            listener = socket.create_server((host, 0), backlog=1024)
        except OSError as error:
            raise UsageError(f"host={host!r} is not an address of this machine: {error}") from None
        self.host = host
        self.port: int = listener.getsockname()[1]
        # The store takes ownership of the file descriptor.
        self.store = dist.TCPStore(
            host,
            self.port,
            None,
            True,
            timedelta(seconds=timeout),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )


def connect_store(host: str, port: int, timeout: float) -> dist.TCPStore:
    """Return a worker's connection to the sender's store. ``timeout`` is in seconds."""
    return dist.TCPStore(host, port, None, False, timedelta(seconds=timeout))


def local_address(host: str, port: int) -> str:
    """Return the address from which this process reaches ``host``. Send nothing.

    Raises:
        OSError: there is no route to the host, or the host does not exist.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        address: str = probe.getsockname()[0]
        return address


class Group:
    """A communicator in which rank 0 sends and the other ranks receive.

    Attributes:
        onward: a second group in which this rank is rank 0, or None. This rank forwards every
            broadcast to the second group.

    Args:
        store: the store. This group uses only the keys under ``prefix``.
        host: the address at which the other ranks reach this rank. gloo listens on this address.
        timeout: the maximum seconds of one operation.
    """

    def __init__(
        self,
        store: dist.Store,
        prefix: str,
        rank: int,
        size: int,
        device: torch.device,
        host: str,
        timeout: float,
    ) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self.timeout = timeout
        self.broken = False
        self.onward: Group | None = None
        self._lock = threading.Lock()
        scoped = dist.PrefixStore(prefix, store)
        limit = timedelta(seconds=timeout)
        self._backend: Any
        if device.type == "cuda":
            options: Any = dist.ProcessGroupNCCL.Options()
            options.is_high_priority_stream = True
            options._timeout = limit
            with _environment(_QUIET), torch.cuda.device(device):
                self._backend = dist.ProcessGroupNCCL(scoped, rank, size, options)
        else:
            options = dist.ProcessGroupGloo._Options()
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
            options._timeout = limit
            options._threads = 2
            self._backend = dist.ProcessGroupGloo(scoped, rank, size, options)

    def begin(self) -> None:
        """Create the communicator now, so that no update has to wait for its creation.

        torch creates the communicator at the first operation.
        """
        first = torch.zeros(64, dtype=torch.uint8, device=self.device)
        with self.deadline():
            self.broadcast([first]).wait()
            self.synchronize()

    @property
    def takes_pieces(self) -> bool:
        """True if a broadcast of several tensors is as fast as a broadcast of one large tensor."""
        return bool(self.device.type == "cuda")

    def broadcast(self, pieces: Sequence[torch.Tensor]) -> Any:
        """Send tensors on rank 0, or receive tensors on another rank.

        On CUDA, the broadcast starts after the work that is already on the current stream.
        ``wait()`` makes the stream wait, not the CPU. Keep the memory until the stream is done.

        Args:
            pieces: contiguous tensors that have the same sizes on all ranks. Several tensors are
                allowed only if ``takes_pieces``, because NCCL then moves all of them in one kernel.

        Returns:
            torch's ``Work``.

        Raises:
            WeightUpdateError: the group was aborted.
        """
        if self.broken:
            raise WeightUpdateError("the group was taken down")
        if len(pieces) == 1:
            work = self._backend.broadcast(pieces[0], 0)
        else:
            self._backend._start_coalescing()
            for piece in pieces:
                self._backend.broadcast(piece, 0)
            work = self._backend._end_coalescing()
        if self.onward is None:
            return work
        work.wait()
        return self.onward.broadcast(pieces)

    def synchronize(self) -> None:
        """Wait until the current stream has finished its work. Call this within ``deadline``.

        Raises:
            WeightUpdateError: the group was aborted.
        """
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        if self.broken:
            raise WeightUpdateError("the group was taken down")

    @contextlib.contextmanager
    def deadline(self) -> Iterator[None]:
        """Abort the group if the block takes more than ``timeout`` seconds."""
        timer = threading.Timer(self.timeout, self.abort)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def abort(self) -> None:
        """Abort the group, which ends the running operations.

        Any thread may call this, and more than once.
        """
        if self.onward is not None:
            self.onward.abort()
        with self._lock:
            if self.broken:
                return
            self.broken = True
            if self.device.type == "cuda":
                with contextlib.suppress(RuntimeError):
                    self._backend.abort()

    def close(self) -> None:
        """Leave the group. No operation may be running."""
        self.abort()
        if self.onward is not None:
            self.onward.close()
        # Without a reference, gloo closes its connections, so the peers notice the disconnect.
        self._backend = None


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Set environment variables within the block.

    torch reads the variables when it creates a group. Other groups of the process are not affected.
    """
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
