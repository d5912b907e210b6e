"""Start pools of fake engines with the vocabulary of the payload, and call them."""

from __future__ import annotations

from typing import Any

import sglrl
from sglrl.wire.engine import EngineInfo

from .load import Call
from .payload import TOKENS, VOCAB, Prompts

SIMULATED_ENGINE = EngineInfo(
    model="fake",
    architecture="FakeEngine",
    dtype="float32",
    device="cpu",
    vocab_size=VOCAB,
    context_length=32_768,
    max_prompt_tokens=32_767,
    max_total_tokens=32_768,
    eos_token_ids=[],
    kv_cache_tokens=1 << 20,
)
"""Describes an engine that a bench simulates without a worker process."""


def fake_pool(**arguments: Any) -> sglrl.Client:
    """Return a pool of fake engines, with any further arguments of ``launch``."""
    return sglrl.launch("fake", engine="fake", vocab_size=VOCAB, **arguments)


def generate_calls(client: sglrl.Client) -> Call:
    """Return a function that makes the i-th call of the payload."""
    generate, prompts = client.generate, Prompts()
    return lambda i: generate(input_ids=prompts[i], max_new_tokens=TOKENS, logprobs=True)
