"""Process groups of the weight channel, beside any that the process has: built from a store of
their own, never registered with ``torch.distributed``, so a trainer's groups are not touched.

Nothing here waits without a deadline. NCCL's kernels have none: a timer takes the group down, which
ends them (``ncclCommAbort``), and ``Group`` then says so. gloo's operations time out by themselves.
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

# What torch's NCCL backend does when an operation is late: by default it ends the whole process.
_QUIET = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
}


def settings(device: torch.device, host: str = "", port: int = 0) -> RankSettings:
    """What must be compared before a collective: see ``RankSettings``."""
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
    """The sender's TCPStore, listening on one address only."""

    def __init__(self, host: str = "127.0.0.1", timeout: float = 60.0) -> None:
        if not isinstance(host, str) or not host:
            raise UsageError(f"host must be an address of this machine, got {host!r}")
        try:
            listener = socket.create_server((host, 0), backlog=1024)
        except OSError as error:
            raise UsageError(f"host={host!r} is no address of this machine: {error}") from None
        self.host = host
        self.port: int = listener.getsockname()[1]
        # The store owns the descriptor from now on.
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
    """A worker's connection to the sender's store."""
    return dist.TCPStore(host, port, None, False, timedelta(seconds=timeout))


def local_address(host: str, port: int) -> str:
    """This process's own address on the way to ``host``. Sends nothing. Raises ``OSError`` if there
    is no way, or no such host."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        address: str = probe.getsockname()[0]
        return address


class Group:
    """A communicator in which rank 0 sends.

    Args:
        store: keys under ``prefix`` are this group's.
        host: this rank's own address, at which the others reach it. gloo listens there.
        timeout: seconds that one operation may take.
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
        """Make the communicator, which comes with the first operation: now, and not in an
        update."""
        first = torch.zeros(64, dtype=torch.uint8, device=self.device)
        with self.deadline():
            self.broadcast([first]).wait()
            self.synchronize()

    @property
    def takes_pieces(self) -> bool:
        """Several tensors cost a broadcast no more than one of their size."""
        return bool(self.device.type == "cuda")

    def broadcast(self, pieces: Sequence[torch.Tensor]) -> Any:
        """Send (rank 0) or receive contiguous tensors, of the same sizes on all ranks; returns
        torch's ``Work``. On CUDA it begins after what the current stream holds, and ``wait()``
        makes the stream wait, not the CPU; until then the caller keeps the memory. More than one
        only if ``takes_pieces``: NCCL then moves them in one kernel."""
        if self.broken:
            raise WeightUpdateError("the group was taken down")
        if len(pieces) == 1:
            return self._backend.broadcast(pieces[0], 0)
        self._backend._start_coalescing()
        for piece in pieces:
            self._backend.broadcast(piece, 0)
        return self._backend._end_coalescing()

    def synchronize(self) -> None:
        """Wait until the current stream has done all. Raises ``WeightUpdateError`` if the group was
        taken down meanwhile. Call it within ``deadline``."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        if self.broken:
            raise WeightUpdateError("the group was taken down")

    @contextlib.contextmanager
    def deadline(self) -> Iterator[None]:
        """Take the group down if the block is not left within ``timeout`` seconds."""
        timer = threading.Timer(self.timeout, self.abort)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def abort(self) -> None:
        """Take the group down; operations under way end. From any thread, more than once."""
        with self._lock:
            if self.broken:
                return
            self.broken = True
            if self.device.type == "cuda":
                with contextlib.suppress(RuntimeError):
                    self._backend.abort()

    def close(self) -> None:
        """Leave. No operation may be under way."""
        self.abort()
        # gloo's connections close with their last reference, which tells the peers.
        self._backend = None


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """torch reads these when it makes a group; other groups of this process keep their own."""
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
