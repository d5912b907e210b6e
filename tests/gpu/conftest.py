"""Models for tests on CUDA devices, and engine arguments that work on every CUDA device."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from sglrl.launching.tiny_model import make_model

# These kernels run on every CUDA device. Capturing prefill graphs would take a minute.
ARGUMENTS = {
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "disable_prefill_cuda_graph": True,
    "mem_fraction_static": 0.3,
}
# SGLang's CUDA kernels support only 16-bit floats. The reference computes in 16 bits as well.
TOLERANCE = 5e-2


def make_gpu_model(folder: Path, seed: int, vocab_size: int = 512) -> Path:
    """Make a bfloat16 model with logits so small that rounding errors stay below the tolerance."""
    make_model(folder, dtype="bfloat16", hidden_size=256, seed=seed, vocab_size=vocab_size)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] /= 8
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="session")
def gpu_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_gpu_model(tmp_path_factory.mktemp("gpu") / "qwen3", seed=1)


@pytest.fixture(scope="session")
def other_gpu_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_gpu_model(tmp_path_factory.mktemp("gpu") / "other", seed=2)
