"""A weight channel that imports torch when it is first used.

With this channel, an engine without torch starts quickly, and also where torch is not installed.
"""

from __future__ import annotations

import runpy
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglrl.config import nccl_environment
from sglrl.errors import EngineError
from sglrl.wire.calls import ErrorBody
from sglrl.wire.processes import WorkerSpec
from sglrl.wire.weights import RankAnswer, RankSettings, Rejoin

from .rank_socket import RankSocket

if TYPE_CHECKING:
    from .rank_channel import RankWeights


class LateRankWeights:
    """Serves the weight channel of an engine on the CPU, until ``close``.

    Args:
        make: returns the real channel, and may import torch. The socket's thread calls it for the
            first message other than ``Rejoin``, if torch is installed.
    """

    def __init__(self, spec: WorkerSpec, make: Callable[[RankSocket], RankWeights]) -> None:
        self._make = make
        self._channel: RankWeights | None = None
        self._torch = _torch_version()
        settings = RankSettings(
            device="cpu", uuid="", torch=self._torch, nccl="", environment=nccl_environment()
        )
        self._socket = RankSocket(spec, 0, settings, self._handle, self._connection_broke)
        self._socket.start()

    def close(self) -> None:
        """Stop serving soon. This does not wait for the thread."""
        self._socket.close()

    def _handle(self, message: Any) -> None:
        if self._channel is None:
            if isinstance(message, Rejoin):
                self._socket.say_hello()
                return
            if not self._torch:
                self._refuse(message)
                return
            self._channel = self._make(self._socket)
        self._channel.handle(message)

    def _refuse(self, message: Any) -> None:
        id_ = getattr(message, "id", None)
        if id_ is not None:
            error = (
                "weight updates need torch in the environment of the workers, also with "
                "engine='fake': pip install torch"
            )
            phase = type(message).__name__.lower()
            self._socket.answer_now(RankAnswer(id_, phase, ErrorBody(EngineError.__name__, error)))

    def _connection_broke(self) -> bool:
        return self._channel is not None and self._channel.connection_broke()


def _torch_version() -> str:
    """Return ``torch.__version__`` without importing torch, or "" if torch is not installed."""
    torch = find_spec("torch")
    if torch is None or torch.origin is None:
        return ""
    return str(runpy.run_path(str(Path(torch.origin).with_name("version.py")))["__version__"])
