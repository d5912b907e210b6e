"""One SGLang worker of a tiny random Qwen3 for all tests, and the same model in transformers.

``tests/conftest.py`` provides these fixtures to all folders where SGLang is installed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

import sglrl
from sglrl.launching.tiny_model import make_model

from .reference import Reference


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def qwen(models: Path) -> Path:
    return make_model(models / "qwen3")


@pytest.fixture(scope="session")
def reference(qwen: Path) -> Reference:
    return Reference(qwen)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def client(qwen: Path) -> AsyncIterator[sglrl.Client]:
    # A random model fills a JSON text with white space wherever the grammar allows it.
    async with sglrl.launch(
        qwen, device="cpu", constrained_json_disable_any_whitespace=True
    ) as client:
        yield client


@pytest.fixture(scope="session")
def smollm2() -> str:
    """Return the folder of a small model that answers in English."""
    return sglrl.local_model("smollm2")
