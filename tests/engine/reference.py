"""Reference logprobs and tokens of a model by Hugging Face transformers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, AutoTokenizer


class Reference:
    """A model in transformers.

    Args:
        dtype: the dtype of the computation. "auto" is the dtype of the saved model.
    """

    def __init__(self, folder: Path, dtype: str = "auto") -> None:
        self.folder = folder
        self.dtype = dtype

    @cached_property
    def model(self) -> Any:
        # The worker needs the other cores.
        torch.set_num_threads(1)
        return AutoModelForCausalLM.from_pretrained(self.folder, dtype=self.dtype).eval()

    @cached_property
    def tokenizer(self) -> Any:
        return AutoTokenizer.from_pretrained(self.folder)

    def logprobs(
        self, ids: Sequence[int] | NDArray[Any], temperature: float = 1.0
    ) -> NDArray[np.float32]:
        """Return float32 [length, vocabulary]: row i is the distribution of token i + 1."""
        return torch.log_softmax(self.logits(ids) / temperature, dim=-1).numpy()

    def logits(self, ids: Sequence[int] | NDArray[Any]) -> torch.Tensor:
        """Return float32 [length, vocabulary]: row i has the logits of token i + 1."""
        tokens = torch.tensor(np.asarray(ids, dtype=np.int64))[None]
        with torch.inference_mode():
            return self.model(input_ids=tokens).logits[0].float()  # type: ignore[no-any-return]

    def logprobs_of(
        self,
        prompt: Sequence[int] | NDArray[Any],
        output: NDArray[Any],
        temperature: float = 1.0,
    ) -> NDArray[np.float32]:
        """Return float32 [len(output)]: logprobs of the tokens of ``output`` after ``prompt``."""
        rows = self.logprobs(np.concatenate([prompt, output]), temperature)
        return rows[len(prompt) - 1 : -1][np.arange(len(output)), output]

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """Return the greedy continuation, end-of-sequence tokens included."""
        ids = list(prompt)
        for _ in range(count):
            ids.append(int(self.logprobs(ids)[-1].argmax()))
        return ids[len(prompt) :]


def penalized(
    logits: torch.Tensor, counted: list[int], how: dict[str, Any], ends: list[int]
) -> torch.Tensor:
    """Return a row of logits after penalties, as docs/logprobs.md describes them.

    Args:
        counted: the output tokens before it.
        how: the sampling parameters.
        ends: tokens that may not be sampled here.
    """
    row = logits.double().clone()
    ids, counts = torch.unique(torch.tensor(counted, dtype=torch.int64), return_counts=True)
    row[ids] -= how.get("frequency_penalty", 0.0) * counts
    row[ids] -= how.get("presence_penalty", 0.0)
    row[ends] = -torch.inf
    scale = how.get("repetition_penalty", 1.0)
    row[ids] = torch.where(row[ids] > 0, row[ids] / scale, row[ids] * scale)
    for token, bias in how.get("logit_bias", {}).items():
        row[token] += bias
    return row / how.get("temperature", 1.0)
