"""TRL's ``GRPOTrainer`` in two processes with a GPU each, and a worker beside one of them.

The tests need TRL, and those of ZeRO also DeepSpeed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import sglrl

pytest.importorskip("trl", reason="needs TRL")

from integrations.trl_program import number_of_parameters, train_in_two_processes

from .conftest import ARGUMENTS, TOLERANCE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 CUDA devices"),
]


@pytest.fixture(scope="module")
def client(gpu_model: Path) -> Iterator[sglrl.BlockingClient]:
    with sglrl.blocking(gpu_model, device="cuda", gpus=[1], **ARGUMENTS) as client:
        yield client


@pytest.mark.parametrize(
    ("kind", "is_sharded"),
    [
        ("whole models", False),
        ("FSDP1", True),
        ("FSDP2", True),
        ("ZeRO-2", False),
        ("ZeRO-3", True),
    ],
)
def test_weights(
    client: sglrl.BlockingClient, gpu_model: Path, kind: str, is_sharded: bool
) -> None:
    if kind.startswith("ZeRO") and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("needs DeepSpeed")
    first = client.weight_version + 1
    lines = train_in_two_processes(gpu_model, client.address, kind)
    copies = sum(line["parameters"] for line in lines) / number_of_parameters(gpu_model)
    # ZeRO-3 pads its shards.
    assert copies < 1.1 if is_sharded else copies == 2
    for line in lines:
        print(line)
        assert [step["versions"] for step in line["steps"]] == [[first], [first + 1]]
        assert max(step["error"] for step in line["steps"]) < TOLERANCE
        assert line["steps"][1]["moved"] > 2 * TOLERANCE
