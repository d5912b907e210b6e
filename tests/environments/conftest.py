"""Environments of verifiers, with an engine that runs in the environment ``full``.

The tasksets are modules of this folder. verifiers imports them by name, also in other processes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from clients.conftest import PYTHON, biases, no_network, pytest_configure
from engine.reference import Reference
from sessions.families import FAMILIES, family_tokenizer

import sglrl
from sglrl.launching.tiny_model import make_model

__all__ = ["biases", "no_network", "pytest_configure"]

_FOLDER = str(Path(__file__).parent)
sys.path.insert(0, _FOLDER)
os.environ["PYTHONPATH"] = os.pathsep.join([_FOLDER, *filter(None, [os.environ.get("PYTHONPATH")])])


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a random model that can be shown tools."""
    folder = make_model(tmp_path_factory.mktemp("models") / "qwen3", context_length=4096)
    family_tokenizer(folder, FAMILIES["qwen3"])
    return folder


@pytest.fixture(scope="session")
def reference(model: Path) -> Reference:
    return Reference(model)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def pool(model: Path) -> AsyncIterator[sglrl.Client]:
    assert PYTHON, "set SGLRL_WORKERS_PYTHON to a Python that has sglrl and SGLang"
    options = {"constrained_json_disable_any_whitespace": True}
    async with sglrl.launch(model, device="cpu", python=PYTHON, **options) as client:
        yield client
