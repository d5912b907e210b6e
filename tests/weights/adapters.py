"""LoRA adapters made by PEFT, and an engine that serves them.

Tests compare logprobs with PEFT, which adds the adapter to the model of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import peft
import torch
from engine.policies import TOLERANCE, logprobs_of_versions
from engine.reference import Reference

import sglrl

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PROMPT = [3 + 7 * i % 500 for i in range(20)]


class PeftAdapter(NamedTuple):
    """An adapter.

    Attributes:
        model: the ``PeftModel``.
        folder: where PEFT saved it.
    """

    model: Any
    folder: Path

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = peft.get_peft_model_state_dict(self.model)
        return found

    @property
    def config(self) -> Any:
        return self.model.peft_config["default"]


def make_adapter(
    reference: Reference,
    folder: Path,
    seed: int,
    rank: int = 4,
    alpha: float = 8,
    modules: Sequence[str] = ALL,
    **options: Any,
) -> PeftAdapter:
    """Make a random adapter that changes the model's answers, and save it."""
    torch.manual_seed(seed)
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules=list(modules),
        init_lora_weights=False,
        task_type="CAUSAL_LM",
        **options,
    )
    model = peft.get_peft_model(deepcopy(reference.model), config).eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if ".lora_" in name:
                tensor.copy_(torch.randn(tensor.shape) * 0.2)
    model.save_pretrained(folder)
    return PeftAdapter(model, folder)


def logprobs(model: Any, prompt: Sequence[int], output: Sequence[int]) -> Any:
    """Return float32 [len(output)]: logprobs of ``output`` after ``prompt``."""
    with torch.inference_mode():
        rows = model(input_ids=torch.tensor([[*prompt, *output]])).logits[0].float()
    rows = torch.log_softmax(rows, dim=-1)[len(prompt) - 1 : -1]
    return rows[torch.arange(len(output)), torch.tensor([*output])].numpy()


def check(completion: sglrl.Completion, model: Any) -> None:
    """Check that one model has sampled the whole completion."""
    expected = logprobs(model, completion.prompt_ids.tolist(), completion.output_ids.tolist())
    np.testing.assert_allclose(completion.logprobs, expected, atol=TOLERANCE, rtol=0)


def check_history(
    completion: sglrl.Completion, models: Mapping[int, Any], *, again: bool = False
) -> None:
    """Check that the adapter of its version has sampled each token.

    Args:
        models: by version of the adapter.
        again: the KV cache was computed again where the version changes.
    """
    spans = completion.lora_versions
    assert spans[0].start == 0
    assert spans[-1].stop == len(completion.output_ids)
    renewed = {*completion.resumed_at, *(span.start for span in spans if again)}
    versions = [span.version for span in spans for _ in range(span.start, span.stop)]
    references: Any = {version: _Model(model) for version, model in models.items()}
    expected = logprobs_of_versions(
        references,
        completion.prompt_ids.tolist(),
        completion.output_ids.tolist(),
        versions,
        renewed,
    )
    np.testing.assert_allclose(completion.logprobs, expected, atol=TOLERANCE, rtol=0)


class _Model(NamedTuple):
    model: Any
