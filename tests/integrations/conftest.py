"""One SGLang worker of a tiny model for all integration tests, and the model in transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import sglrl
from sglrl.launching.tiny_model import make_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the model's folder."""
    # TorchRL chooses a chat template by the folder's name. It uses its default for unknown names.
    return make_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="package")
def pool(tiny: Path) -> Iterator[sglrl.BlockingClient]:
    """Launch one worker. Tests must not change its weights; they launch their own pool instead."""
    with sglrl.blocking(tiny, device="cpu") as client:
        yield client


@pytest.fixture(scope="session")
def hf_model(tiny: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    # The worker needs the other cores.
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(tiny, dtype="auto").eval()
