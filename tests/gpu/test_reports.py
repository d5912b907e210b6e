"""What requests on a GPU report about their tokens, and logit processors."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine.reference import Reference
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

import sglrl

from .conftest import ARGUMENTS, TOLERANCE
from .test_experts import SHAPES, WITHOUT_FUSION, write_model

pytestmark = [pytest.mark.gpu, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]

K = 4
PROMPTS = [[3 + (5 * i + 7 * j * j) % 500 for j in range(5 + 300 * i)] for i in range(4)]


@pytest.mark.parametrize("tp_size", [1, 2])
async def test_routed_experts(tp_size: int, tmp_path: Path) -> None:
    """Prompts are prefilled in parts, decoded, found in the cache, and recomputed."""
    if torch.cuda.device_count() < tp_size:
        pytest.skip(f"needs {tp_size} CUDA devices")
    shapes = {**SHAPES, "num_experts": 16, "num_experts_per_tok": K}
    config = Qwen3MoeConfig(**shapes, head_dim=64, norm_topk_prob=True)
    folder = write_model(config, 0, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    async with sglrl.launch(
        folder,
        device="cuda",
        tp_size=tp_size,
        enable_return_routed_experts=True,
        chunked_prefill_size=256,
        **(ARGUMENTS | WITHOUT_FUSION),
    ) as client:
        wanted: dict[str, Any] = {"max_new_tokens": 70, "temperature": 0, "ignore_eos": True}
        for _ in range(2):
            made = await client.generate(input_ids=PROMPTS, return_routed_experts=True, **wanted)
            for prompt, one in zip(PROMPTS, made, strict=True):
                check_experts(model, [*prompt, *one.output_ids.tolist()], one.routed_experts)
        call = client.stream(input_ids=PROMPTS[2], return_routed_experts=True, **wanted)
        async for _ in call:
            await client.pause("retract")
            await client.resume()
        one = call.completion
        check_experts(model, [*PROMPTS[2], *one.output_ids.tolist()], one.routed_experts)


@torch.no_grad()
def check_experts(model: Any, ids: list[int], rows: Any) -> None:
    """Check routed experts.

    Rounding may choose between experts that are about equally likely, and later layers then differ.
    """
    found = model(torch.tensor([ids]), output_router_logits=True).router_logits
    logits = torch.stack([one.reshape(len(ids), -1) for one in found], dim=1)[:-1].float().numpy()
    assert (rows.dtype, rows.shape) == (np.uint8, (*logits.shape[:2], K))
    chosen = np.take_along_axis(logits, rows.astype(np.int64), axis=-1)
    least = np.sort(logits, axis=-1)[..., -K]
    assert (chosen.min(axis=-1) >= least - TOLERANCE)[:, 0].all()
    assert (np.diff(np.sort(rows, axis=-1), axis=-1) > 0).all()
    exact = (np.sort(rows) == np.sort(np.argsort(-logits)[..., :K])).all(axis=-1).mean()
    print(f"rows with exactly the experts of the reference: {exact:.3f}")
    assert exact > 0.95


async def test_hidden_states_and_masks(gpu_model: Path) -> None:
    reference = Reference(gpu_model)
    wanted: dict[str, Any] = {"max_new_tokens": 40, "ignore_eos": True, "logprobs": True}
    async with sglrl.launch(
        gpu_model, device="cuda", enable_return_hidden_states=True, **ARGUMENTS
    ) as client:
        limits: dict[str, Any] = {"top_p": 0.5, "return_sampling_mask": True, "seed": 3}
        made = await client.generate(
            input_ids=PROMPTS[:3], return_hidden_states=True, **wanted, **limits
        )
    for prompt, one in zip(PROMPTS, made, strict=False):
        ids = torch.tensor([[*prompt, *one.output_ids.tolist()]])
        with torch.inference_mode():
            found = reference.model(input_ids=ids, output_hidden_states=True)
        expected = found.hidden_states[-1][0, len(prompt) - 1 : -1].float().numpy()
        assert one.hidden_states is not None
        scale = np.abs(expected).max()
        np.testing.assert_allclose(one.hidden_states / scale, expected / scale, atol=TOLERANCE)
        rows = torch.log_softmax(found.logits[0, len(prompt) - 1 : -1].float(), -1).exp().numpy()
        assert one.sampling_mask is not None
        for row, ids_of_row, token in zip(
            rows, one.sampling_mask.sets(), one.output_ids, strict=True
        ):
            assert token in ids_of_row
            inside = row[ids_of_row]
            assert abs(inside.sum() - 0.5) < TOLERANCE + inside.max()
            assert np.sort(row)[-len(inside)] - inside.min() < TOLERANCE * inside.min()


async def test_logit_processors(gpu_model: Path) -> None:
    """Two processors and a plain request share batches."""
    reference = Reference(gpu_model)
    shift, ban = (f"engine.processors:{name}" for name in ("Shift", "Ban"))
    banned = list(range(0, 512, 2))
    wanted: dict[str, Any] = {"max_new_tokens": 40, "ignore_eos": True, "logprobs": True}
    async with sglrl.launch(
        gpu_model, device="cuda", logit_processors=[shift, ban], **ARGUMENTS
    ) as client:
        calls = [
            client.generate(input_ids=PROMPTS[1], **wanted, **params)
            for params in (
                {},
                {"logit_processor": shift, "custom_params": {"bias": 9.5}},
                {"logit_processor": ban, "custom_params": {"tokens": banned, "every": 3}},
            )
        ]
        plain, shifted, without = await asyncio.gather(*calls)
    for one in (plain, shifted, without):
        ids = [*PROMPTS[1], *one.output_ids.tolist()]
        rows = reference.logits(ids)[len(PROMPTS[1]) - 1 : -1].numpy()
        for at, row in enumerate(rows):
            if one is shifted:
                row[(7 * ids[len(PROMPTS[1]) + at - 1] + at) % len(row)] += 9.5
            if one is without and at % 3 == 0:
                row[banned] = -np.inf
        expected = rows[range(40), one.output_ids] - np.logaddexp.reduce(rows, axis=1)
        np.testing.assert_allclose(one.logprobs, expected, atol=TOLERANCE)
    assert (without.output_ids[::3] % 2 == 1).all()
