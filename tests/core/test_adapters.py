"""The names and the shapes of an adapter's tensors, checked against the model."""

from __future__ import annotations

import pytest

from sglrl.core.adapters import check_adapter, leaf_of, own_name, parent_of, siblings
from sglrl.errors import InvalidAdapter
from sglrl.wire.engine import EngineInfo
from sglrl.wire.weights import ModelDescription, TensorSpec

NAME = "base_model.model.model.layers.3.self_attn.{}.lora_{}.weight"
INFO = EngineInfo(
    model="m",
    architecture="A",
    dtype="float32",
    device="cpu",
    vocab_size=9,
    context_length=9,
    max_prompt_tokens=8,
    max_total_tokens=9,
    eos_token_ids=[],
    kv_cache_tokens=99,
    max_lora_rank=8,
    lora_target_modules=("k_proj", "q_proj"),
)
MODEL = ModelDescription(
    [
        TensorSpec("model.layers.3.self_attn.q_proj.weight", "float32", (12, 6)),
        TensorSpec("model.layers.3.self_attn.k_proj.weight", "float32", (4, 6)),
    ],
    [],
)


def specs(
    module: str = "q_proj",
    a: tuple[int, ...] = (2, 6),
    b: tuple[int, ...] = (12, 2),
    dtype: str = "float32",
) -> list[TensorSpec]:
    return [
        TensorSpec(NAME.format(module, "A"), dtype, a),
        TensorSpec(NAME.format(module, "B"), dtype, b),
    ]


def test_names() -> None:
    name = NAME.format("q_proj", "A")
    assert own_name(name) == own_name(name.replace(".weight", ".default.weight")) == name
    assert leaf_of(name) == "q_proj"
    assert parent_of(name) == "model.layers.3.self_attn.qkv_proj"
    assert siblings(name) == {
        leaf: NAME.format(leaf, "A") for leaf in ("q_proj", "k_proj", "v_proj")
    }
    other = "base_model.model.model.layers.0.mlp.down_proj.lora_B.weight"
    assert parent_of(other) == "model.layers.0.mlp.down_proj"
    assert siblings(other) == {"down_proj": other}
    for wrong in ("x", name.replace("lora_A", "lora_C"), name.replace(".weight", ".poems.weight")):
        with pytest.raises(InvalidAdapter, match="is not a tensor of a LoRA adapter"):
            own_name(wrong)


def test_adapters_that_fit() -> None:
    check_adapter(specs(), 2, INFO, MODEL)
    check_adapter([*specs(), *specs("k_proj", b=(4, 2))], 2, INFO, MODEL)
    check_adapter(specs(b=(7, 2)), 2, INFO, None)


@pytest.mark.parametrize(
    ("given", "rank", "text"),
    [
        (specs(), 9, r"has rank 9; the engine was launched for at most 8 \(max_lora_rank=\)"),
        ([], 2, "has no tensors"),
        (specs("v_proj"), 2, "changes the modules v_proj; the engine was launched for k_proj, q_p"),
        (specs()[:1], 2, "without base_model.model.model.layers.3.self_attn.q_proj.lora_B.weight"),
        (specs()[1:], 2, "without base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight"),
        (specs(), 3, r"has the shape \[2, 6\], which is not \[rank, in\] of rank 3"),
        (specs(b=(12, 3)), 2, r"has the shape \[12, 3\], which is not \[out, rank\] of rank 2"),
        (specs(a=(2, 6, 1)), 2, r"which is not \[rank, in\]"),
        (specs(a=(2, 7)), 2, r"does not fit model.layers.3.self_attn.q_proj.weight, \[12, 6\]"),
        (specs(b=(4, 2)), 2, r"does not fit model.layers.3.self_attn.q_proj.weight, \[12, 6\]"),
        (specs(dtype="int8"), 2, "holds int8; adapters hold float32, float16, bfloat16"),
    ],
)
def test_adapters_that_do_not_fit(given: list[TensorSpec], rank: int, text: str) -> None:
    with pytest.raises(InvalidAdapter, match=text):
        check_adapter(given, rank, INFO, MODEL)


def test_a_layer_that_the_model_lacks() -> None:
    given = [
        TensorSpec(spec.name.replace("layers.3", "layers.4"), spec.dtype, spec.shape)
        for spec in specs()
    ]
    with pytest.raises(InvalidAdapter, match=r"the model has no linear layer model\.layers\.4"):
        check_adapter(given, 2, INFO, MODEL)
