"""A fork server imports SGLang for workers with GPUs, and does not initialise CUDA."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path

import pytest
import torch

from sglrl.driver.fork_server import ForkConnection, ForkServer, fork_server
from sglrl_workers.engine.sglang import cuda_answers
from sglrl_workers.engine.sglang.cuda_answers import Device, answers, devices
from sglrl_workers.fork_server import _SERVER_SCORE

GPU = Device("NVIDIA H200", (9, 0), {"multi_processor_count": 132, "major": 9})


def test_questions_during_an_import() -> None:
    before = torch.cuda.get_device_capability
    kind = torch._C._get_accelerator()
    with answers([GPU, GPU]):
        assert torch.cuda.is_available()
        assert torch.cuda.device_count() == 2
        assert torch.cuda.get_device_capability(torch.cuda.current_device()) == (9, 0)
        assert torch.cuda.get_device_name("cuda:1") == "NVIDIA H200"
        # The kind of accelerator. Its answer initialises CUDA, too.
        assert torch._C._get_accelerator() == torch.device("cuda")
        assert torch.accelerator.current_accelerator() == torch.device("cuda")
        properties = torch.cuda.get_device_properties(0)
        assert (properties.major, properties.multi_processor_count) == (9, 132)
        with pytest.raises(AttributeError):
            properties.l2_size  # noqa: B018
        kept = torch.cuda.device_count
    assert kept() == torch.cuda.device_count()
    assert torch.cuda.get_device_capability is before
    assert torch._C._get_accelerator() == kind


def test_an_import_that_initialises_cuda() -> None:
    """The error is not lost if the import catches it."""
    with (
        pytest.raises(RuntimeError, match="CUDA was initialised"),
        answers([GPU]),
        contextlib.suppress(RuntimeError),
    ):
        torch.cuda.mem_get_info()


def test_cuda_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_answers, "_SECONDS", 1)
    monkeypatch.setattr(cuda_answers, "_ask", signal.pause)
    with pytest.raises(RuntimeError, match="CUDA did not start within 1 s"):
        devices()


def test_cuda_that_does_not_work(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cuda_answers, "_ask", lambda: 1 / 0)
    with pytest.raises(RuntimeError, match="CUDA does not work in a fork of this process"):
        devices()
    assert "ZeroDivisionError" in capfd.readouterr().err


@pytest.mark.parametrize("known", [[], [GPU, Device("NVIDIA L4", (8, 9), GPU.properties)]])
def test_gpus_that_differ(known: list[Device]) -> None:
    with pytest.raises(RuntimeError, match="the GPUs differ, or there is none"), answers(known):
        pass


async def test_a_server_that_cannot_import_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here it finds no GPU. Its workers would import SGLang themselves."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    server = fork_server("sglang-cuda")
    connection = await ForkConnection.open(server, lambda *_: None, lambda *_: None, 100.0)
    connection.close()
    assert server.alive
    check(server)
    # Another test must not get this server, which sees no GPU.
    server.close()


def check(server: ForkServer) -> None:
    command = Path(f"/proc/{server.process.pid}/cmdline").read_text().split("\0")
    assert "sglang-late" in command
    assert "or there is none: []" in server.log.read_text()
    score = int(Path(f"/proc/{server.process.pid}/oom_score_adj").read_text())
    own = int(Path("/proc/self/oom_score_adj").read_text())
    assert score == min(1000, own + _SERVER_SCORE)
