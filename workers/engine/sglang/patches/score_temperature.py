"""Score given tokens at any temperature. SGLang itself scores them only at temperature 1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.layers.logprob_processor import InputLogprobProcessor

from ..patch import Setup

_temperatures: list[float] | None = None
"""The temperature of each request in the running prefill. None if all temperatures are 1."""


def install(setup: Setup) -> None:
    """Patch the function with which SGLang computes logprobs of prompts."""
    theirs = InputLogprobProcessor.forward

    def forward(
        self: Any, *, token_to_seq_idx: list[int], get_logits_fn: Any, **kwargs: Any
    ) -> Any:
        if _temperatures is not None:
            divisors = [_temperatures[request] for request in token_to_seq_idx]
            get_logits_fn = _divided(get_logits_fn, divisors)
        return theirs(
            self, token_to_seq_idx=token_to_seq_idx, get_logits_fn=get_logits_fn, **kwargs
        )

    InputLogprobProcessor.forward = forward


def attach(requests: Sequence[Any]) -> None:
    """Set the temperatures of a prefill that is about to run."""
    global _temperatures
    reports = [getattr(request, "sglrl_report", None) for request in requests]
    temperatures = [1.0 if report is None else report.temperature for report in reports]
    _temperatures = temperatures if any(one != 1 for one in temperatures) else None


def _divided(get_logits: Any, divisors: list[float]) -> Any:
    """Return ``get_logits`` with divided results. Row i, counted over all calls, has divisor i."""
    left = torch.tensor(divisors)

    def divided(states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        nonlocal left
        logits: torch.Tensor = get_logits(states, *args, **kwargs)
        own, left = left[: len(logits)], left[len(logits) :]
        return logits.div_(own.to(logits.device)[:, None])

    return divided
