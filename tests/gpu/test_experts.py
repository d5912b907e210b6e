"""Mixtures of experts on CUDA devices: generation, and updates from a module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine.reference import Reference
from transformers import AutoModelForCausalLM, Qwen2MoeConfig, Qwen3MoeConfig

import sglrl

from .conftest import ARGUMENTS, TOLERANCE

pytestmark = [pytest.mark.gpu, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]

SHAPES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 4,
    # Every token uses all experts. Otherwise rounding, which differs between kernels, may choose.
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 256,
    "decoder_sparse_step": 1,
    "max_position_embeddings": 2048,
    "eos_token_id": 2,
}
CONFIGS = {
    "qwen3": lambda: Qwen3MoeConfig(**SHAPES, head_dim=64, norm_topk_prob=True),
    "qwen2": lambda: Qwen2MoeConfig(**SHAPES, shared_expert_intermediate_size=512),
}
# On Hopper, SGLang chooses these kernels for these models, but they do not run on every host.
WITHOUT_FUSION = {"enforce_disable_flashinfer_allreduce_fusion": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    "neighbour": {"gpus": [0]},
    "nccl": {"gpus": [1]},
    "tensor-parallel": {"gpus": [0, 1], "tp_size": 2, **WITHOUT_FUSION},
    "expert-parallel": {"gpus": [0, 1], "tp_size": 2, "ep_size": 2, **WITHOUT_FUSION},
}
PROMPTS = [[3 + (7 * i + 11 * j * j) % 500 for j in range(5 + 30 * i)] for i in range(3)]


def write_model(config: Any, seed: int, folder: Path) -> Path:
    """Make a bfloat16 model with logits so small that rounding errors stay below the tolerance."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.copy_(torch.randn(tensor.shape) * 0.05 + (tensor.dim() == 1))
        model.lm_head.weight /= 8
    model.save_pretrained(folder)
    return folder


async def check(client: sglrl.Client, reference: Reference) -> None:
    assert await client.verify_weights(reference.model) == []
    made = await client.generate(
        input_ids=PROMPTS, max_new_tokens=24, temperature=0, logprobs=True, ignore_eos=True
    )
    for prompt, one in zip(PROMPTS, made, strict=True):
        expected = reference.logprobs_of(prompt, one.output_ids)
        np.testing.assert_allclose(one.logprobs, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("layout", LAYOUTS)
async def test_updates(layout: str, kind: str, tmp_path: Path) -> None:
    options = LAYOUTS[layout]
    if torch.cuda.device_count() <= max(options["gpus"]):
        pytest.skip(f"needs {max(options['gpus']) + 1} CUDA devices")
    old, new = (
        Reference(write_model(CONFIGS[kind](), seed, tmp_path / str(seed))) for seed in range(2)
    )
    async with sglrl.launch(old.folder, device="cuda", **options, **ARGUMENTS) as client:
        await check(client, old)
        assert len(await client.verify_weights(new.model)) > 10
        on_gpu = {name: p.to("cuda:0") for name, p in new.model.named_parameters()}
        for weights, mode, bucket in (
            (on_gpu, "full", 256 << 20),
            (old.model, "bucketed", 1 << 20),
            (on_gpu, "auto", 1 << 20),
        ):
            report = await client.update_weights(weights, mode=mode, bucket_bytes=bucket)
            print(layout, report)
            await check(client, old if weights is old.model else new)
        await client.update_weights_from_disk(old.folder)
        await check(client, old)
