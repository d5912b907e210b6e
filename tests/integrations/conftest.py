"""One SGLang worker of a tiny model for all tests of integrations, and the same model in
transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import sglrl
from sglrl.tools.tiny_model import make_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the model."""
    # TorchRL takes a chat template by the name of the folder, and this one for no name it knows.
    return make_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="package")
def pool(tiny: Path) -> Iterator[sglrl.BlockingClient]:
    """Its weights stay as they are: tests that change them launch their own."""
    with sglrl.blocking(tiny, device="cpu") as client:
        yield client


@pytest.fixture(scope="session")
def hf_model(tiny: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    # The worker needs the other cores.
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(tiny, dtype="auto").eval()
