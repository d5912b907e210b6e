"""A weight channel that imports torch when it is first used."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from sglrl.wire.processes import WorkerSpec
from sglrl.wire.weights import Describe, Join, KeepWeights, RankAnswer, Rejoin
from sglrl_workers.weights import late_channel


def test_the_engine_starts_without_torch() -> None:
    code = (
        "import sys, sglrl_workers.engine.fake, sglrl_workers.engine.loop, "
        "sglrl_workers.weights.late_channel as late; "
        "print('torch' in sys.modules, late._torch_version())"
    )
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert made.stdout.split() == ["False", str(torch.__version__)]


def test_torch_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every question is answered, and the error says what to do."""
    answers: list[RankAnswer] = []
    hellos: list[None] = []

    class Socket:
        def __init__(self, spec: Any, rank: int, settings: Any, handle: Any, broke: Any) -> None:
            assert (settings.device, settings.torch) == ("cpu", "")
            self.handle, self.broke = handle, broke
            sockets.append(self)

        def start(self) -> None: ...

        def answer_now(self, answer: RankAnswer) -> None:
            answers.append(answer)

        def say_hello(self, *, dirty: bool = False) -> None:
            hellos.append(None)

    sockets: list[Socket] = []
    monkeypatch.setattr(late_channel, "RankSocket", Socket)
    monkeypatch.setattr(late_channel, "find_spec", lambda name: None)
    spec: WorkerSpec = None  # type: ignore[assignment]

    def make(socket: Any) -> Any:
        raise AssertionError("it would import torch")

    late_channel.LateRankWeights(spec, make)
    (socket,) = sockets
    messages = [Describe(1), Join(2, 1, "", 0, 1, 2, -1, 0, 1.0), KeepWeights(3, 1)]
    for message in messages:
        socket.handle(message)
    assert [answer.id for answer in answers] == [1, 2, 3]
    assert all(a.error is not None and "pip install torch" in a.error.message for a in answers)
    socket.handle(Rejoin(4))
    assert hellos == [None]
    assert socket.broke() is False
