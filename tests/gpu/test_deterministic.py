"""Requests to a deterministic engine give the same bits, whatever happens to them."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sgl_kernel
from engine.reference import Reference

import sglrl
from sglrl.launching.tiny_model import make_model

from .conftest import ARGUMENTS, TOLERANCE

HAS_FA3 = any(Path(sgl_kernel.__file__).parent.glob("flash_ops*.so"))
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(300),
    pytest.mark.skipif(not HAS_FA3, reason="needs the FA3 kernels of sgl-kernel"),
]

DRAW = np.random.default_rng(0)
PROMPT = DRAW.integers(3, 4000, 700).tolist()
OTHERS = [DRAW.integers(3, 4000, int(DRAW.integers(5, 900))).tolist() for _ in range(63)]
COMMON: dict[str, Any] = {"max_new_tokens": 200, "ignore_eos": True, "logprobs": True}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seed": {"seed": 7},
    "limits": {"seed": 7, "top_p": 0.9, "top_k": 50},
    "processed": {"seed": 7, "top_p": 0.9, "logprobs_mode": "processed_logprobs"},
}


def same(made: sglrl.Completion, first: sglrl.Completion) -> None:
    assert made.output_ids.tolist() == first.output_ids.tolist()
    assert made.logprobs is not None
    assert first.logprobs is not None
    assert made.logprobs.tobytes() == first.logprobs.tobytes()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(
        tmp_path_factory.mktemp("deterministic"),
        dtype="bfloat16",
        hidden_size=512,
        layers=4,
        vocab_size=4096,
        initializer_range=0.04,
    )


async def test_bits(model: Path) -> None:
    arguments = ARGUMENTS | {"attention_backend": "fa3", "chunked_prefill_size": 2048}
    async with sglrl.launch(model, device="cuda", deterministic=True, **arguments) as client:

        async def one(kind: str) -> sglrl.Completion:
            return await client.generate(input_ids=PROMPT, **COMMON, **KINDS[kind])

        await client.flush_cache()
        firsts = {kind: await one(kind) for kind in KINDS}
        for kind, first in firsts.items():
            # The prompt is in the prefix cache now.
            same(await one(kind), first)
            for size in (8, 64):
                await client.flush_cache()
                rest = asyncio.ensure_future(
                    client.generate(input_ids=OTHERS[: size - 1], **COMMON)
                )
                same(await one(kind), first)
                await rest
            stream = client.stream(input_ids=PROMPT, **COMMON, **KINDS[kind])
            retracted = 0
            async for chunk in stream:
                retracted += not chunk.finish_reason
                await client.pause("retract")
                await client.resume()
            assert retracted > 0
            same(stream.completion, first)
        for kind in ("greedy", "limits"):
            killed = False
            stream = client.stream(input_ids=PROMPT, **COMMON, **KINDS[kind])
            async for _ in stream:
                if not killed:
                    killed = True
                    os.kill(client.workers[0].pid, signal.SIGKILL)
            assert stream.completion.resumed == 1
            same(stream.completion, firsts[kind])


async def test_rl_on_policy_target(model: Path) -> None:
    """Seeds repeat their tokens, and logprobs equal those of transformers."""
    reference = Reference(model)
    arguments = ARGUMENTS | {"attention_backend": "fa3", "rl_on_policy_target": "fsdp"}
    wanted = {**COMMON, "max_new_tokens": 60, "seed": 3}
    async with sglrl.launch(model, device="cuda", **arguments) as client:
        first = await client.generate(input_ids=PROMPT, **wanted)
        rest = asyncio.ensure_future(client.generate(input_ids=OTHERS[:7], **COMMON))
        same(await client.generate(input_ids=PROMPT, **wanted), first)
        await rest
    expected = reference.logprobs_of(PROMPT, first.output_ids)
    print("largest difference:", np.abs(first.logprobs - expected).max())
    np.testing.assert_allclose(first.logprobs, expected, atol=TOLERANCE)
