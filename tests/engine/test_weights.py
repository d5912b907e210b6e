"""New weights in a running engine: what it answers afterwards is what Hugging Face transformers
says of them, token by token, whatever ran meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file, save_file

import sglrl
from sglrl.weights import UpdateReport

from .policies import PROMPTS, Lab, Policies, gated, phase_event
from .reference import Reference

pytestmark = pytest.mark.asyncio(loop_scope="session")

LONG = {"max_new_tokens": 240, "logprobs": True, "ignore_eos": True}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def lab(models: Path) -> AsyncIterator[Lab]:
    """One worker that runs four requests at a time, so that the fifth waits in the engine."""
    policies = Policies(models / "policies")
    async with sglrl.launch(
        policies[0].folder, device="cpu", max_running_requests=4, weight_device="cpu"
    ) as client:
        yield Lab(client, policies)


async def until_running(client: sglrl.Client, count: int) -> None:
    """Every answer to ``stats`` comes between two scheduler steps, so this waits by calls."""
    while sum(s.engine.running for s in await client.stats()) < count:
        pass


# --- what may be given ----------------------------------------------------------------------------


def nested(weights: dict[str, torch.Tensor]) -> Any:
    tensordict = pytest.importorskip("tensordict")
    return tensordict.TensorDict(weights).unflatten_keys(".")


FORMS: dict[str, Callable[[torch.nn.Module], Any]] = {
    "module": lambda model: model,
    "mapping": lambda model: model.state_dict(),
    "pairs": lambda model: iter(model.state_dict().items()),
    "tensordict": lambda model: nested(model.state_dict()),
    "float64": lambda model: {n: t.double() for n, t in model.state_dict().items()},
    "transposed": lambda model: {n: t.t().contiguous().t() for n, t in model.named_parameters()},
}


@pytest.mark.parametrize("form", FORMS)
async def test_answers_are_those_of_the_new_weights(lab: Lab, form: str) -> None:
    before = lab.client.weight_version
    seed = 1 + list(FORMS).index(form) % 3
    report = await lab.update(seed, FORMS[form](lab.policies[seed].model))
    assert report.version == before + 1
    await lab.check()
