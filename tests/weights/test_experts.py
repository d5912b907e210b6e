"""Mixtures of experts: one tensor of the module holds many tensors of the checkpoint."""

from __future__ import annotations

import copy
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from engine.reference import Reference
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen2MoeConfig, Qwen3MoeConfig

import sglrl
from sglrl.weights.tensor_source import gather

pytestmark = pytest.mark.asyncio(loop_scope="session")

SHAPES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": None,
}
CONFIGS = {
    "qwen3": lambda: Qwen3MoeConfig(
        **SHAPES, head_dim=16, num_experts=4, moe_intermediate_size=24, norm_topk_prob=True
    ),
    # This model has an expert that all tokens share, behind a gate.
    "qwen2": lambda: Qwen2MoeConfig(
        **SHAPES,
        num_experts=4,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=40,
        decoder_sparse_step=1,
    ),
    "mixtral": lambda: MixtralConfig(**SHAPES, num_local_experts=4),
}
PROMPTS = [[3 + (5 * i + 7 * j * j) % 290 for j in range(3 + 20 * i)] for i in range(3)]


def make(kind: str, seed: int) -> Any:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind](), dtype=torch.float32).eval()
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.copy_(torch.randn(tensor.shape) * 0.1 + (tensor.dim() == 1))
    return model


@pytest.fixture(scope="module", params=CONFIGS)
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    found = []
    for seed in range(2):
        found.append(tmp_path_factory.mktemp(request.param) / str(seed))
        make(request.param, seed).save_pretrained(found[-1])
    return found


@pytest.fixture(scope="module")
def references(folders: list[Path]) -> list[Reference]:
    return [Reference(folder) for folder in folders]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def engine(folders: list[Path]) -> AsyncIterator[sglrl.Client]:
    async with sglrl.launch(folders[0], device="cpu", timeout=300) as client:
        yield client


async def check(client: sglrl.Client, reference: Reference) -> None:
    made = await client.generate(
        input_ids=PROMPTS, max_new_tokens=12, temperature=0, logprobs=True, ignore_eos=True
    )
    for prompt, one in zip(PROMPTS, made, strict=True):
        expected = reference.logprobs_of(prompt, one.output_ids)
        np.testing.assert_allclose(one.logprobs, expected, atol=1e-4, rtol=0)
        assert one.output_ids.tolist() == reference.greedy(prompt, 12)


class Sharded(torch.Tensor):
    """A tensor that is sharded over a trainer's ranks: only ``full_tensor`` may be called."""

    asked: list[tuple[int, ...]]
    full: torch.Tensor

    @staticmethod
    def of(tensor: torch.Tensor, asked: list[tuple[int, ...]]) -> Sharded:
        made = torch.Tensor._make_subclass(Sharded, torch.zeros_like(tensor))
        made.full, made.asked = tensor, asked
        return made

    def full_tensor(self) -> torch.Tensor:
        self.asked.append(tuple(self.shape))
        return self.full


async def test_a_module_is_sent_as_its_checkpoint(
    engine: sglrl.Client, references: list[Reference], folders: list[Path]
) -> None:
    await check(engine, references[0])
    one, other = (reference.model for reference in references)
    assert any(name.endswith("experts.gate_up_proj") for name, _ in one.named_parameters())
    assert await engine.verify_weights(one) == []
    await engine.update_weights(other, version=10)
    assert await engine.verify_weights(other) == []
    await check(engine, references[1])
    # Send a mapping, in full and in buckets that each hold parts of several tensors.
    state = one.state_dict()
    for mode in ("full", "bucketed"):
        await engine.update_weights(other)
        await engine.update_weights(state, mode=mode, bucket_bytes=5000)
        assert await engine.verify_weights(state) == []
        await check(engine, references[0])
    await engine.update_weights_from_disk(folders[1])
    assert await engine.verify_weights(other) == []


async def test_a_sharded_one_is_gathered_once_and_in_order(
    engine: sglrl.Client, references: list[Reference]
) -> None:
    for model in (reference.model for reference in references):
        asked: list[tuple[int, ...]] = []
        state = {name: Sharded.of(t, asked) for name, t in model.state_dict().items()}
        await engine.update_weights(state)
        sent, asked[:] = asked[:], []
        # The other ranks of the trainer call ``gather`` during the update.
        gather(state)
        assert sent == asked == [tuple(t.shape) for t in state.values()]
        assert await engine.verify_weights(model) == []


async def test_what_differs_has_its_name_in_the_checkpoint(
    engine: sglrl.Client, references: list[Reference]
) -> None:
    model = references[1].model
    await engine.update_weights(model)
    changed = copy.deepcopy(model)
    with torch.no_grad():
        # The second half of the third expert, which is the "up" projection.
        changed.model.layers[1].mlp.experts.gate_up_proj[2, -1, 5] += 1
        changed.model.layers[0].mlp.experts.down_proj[3, 0, 0] += 1
    (down, up) = await engine.verify_weights(changed)
    assert ".layers.0." in down
    assert ".experts.3." in down
    assert down.endswith(("down_proj.weight", "w2.weight"))
    assert ".layers.1." in up
    assert ".experts.2." in up
    assert up.endswith(("up_proj.weight", "w3.weight"))
    names = (await engine.model_metadata()).keys()
    assert {down, up} < names


async def test_other_numbers_of_experts(engine: sglrl.Client, references: list[Reference]) -> None:
    model = references[1].model
    await engine.update_weights(model)
    name = "model.layers.0.mlp.experts.down_proj"
    state = model.state_dict()
    with pytest.raises(sglrl.InvalidWeights, match=r"missing: .*layers\.0\..*experts\.3\."):
        await engine.update_weights(state | {name: state[name][:3]})
    with pytest.raises(sglrl.InvalidWeights, match=rf"unknown: {name}"):
        await engine.update_weights(state | {name: torch.cat([state[name], state[name]])})
    assert await engine.verify_weights(model) == []


async def test_parts_of_larger_tensors_are_verified(
    engine: sglrl.Client, references: list[Reference]
) -> None:
    """Verify a view with an offset into its memory and a view with another memory layout."""
    state = references[1].model.state_dict()
    name = "model.layers.0.self_attn.k_proj.weight"
    larger = torch.cat([torch.zeros_like(state[name]), state[name]])
    await engine.update_weights(state)
    for view in (larger[len(state[name]) :], state[name].T.contiguous().T):
        torch.testing.assert_close(view, state[name], atol=0, rtol=0)
        await engine.update_weights({name: view}, partial=True)
        assert await engine.verify_weights(state | {name: view}) == []


async def test_an_engine_without_weights_gets_all_of_them(
    folders: list[Path], references: list[Reference], tmp_path: Path
) -> None:
    """The engine has no checkpoint from which to read the names of the weights."""
    shutil.copy(folders[0] / "config.json", tmp_path)
    async with sglrl.launch(tmp_path, device="cpu", timeout=300, load_format="dummy") as client:
        await client.update_weights(references[1].model)
        assert await client.verify_weights(references[1].model) == []
        await check(client, references[1])
