"""The CUDA stream on which a rank receives weights. The engine uses other streams."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


class SideStream:
    """A CUDA stream of one device. On a CPU there is no stream to use or to wait for."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        """Run the block without gradients and, on a GPU, on this stream."""
        with torch.no_grad():
            if self._stream is None:
                yield
            else:
                with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
                    yield

    def synchronize(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()
