"""Which tensors of a checkpoint make up one tensor of all experts."""

from __future__ import annotations

import pytest

from sglrl.weights.moe_experts import Part, parts_of

QWEN = {
    f"model.layers.1.mlp.experts.{expert}.{name}_proj.weight": None
    for expert in range(3)
    for name in ("gate", "up", "down")
}
MIXTRAL = {"block_sparse_moe.gate.weight": None} | {
    f"block_sparse_moe.experts.{expert}.w{i}.weight": None for expert in range(2) for i in (1, 2, 3)
}


def test_gate_and_up() -> None:
    parts = parts_of("model.layers.1.mlp.experts.gate_up_proj", (3, 8, 5), QWEN)
    prefix = "model.layers.1.mlp.experts"
    assert parts == [
        Part(f"{prefix}.0.gate_proj.weight", 0, 0, 4),
        Part(f"{prefix}.0.up_proj.weight", 0, 4, 4),
        Part(f"{prefix}.1.gate_proj.weight", 1, 0, 4),
        Part(f"{prefix}.1.up_proj.weight", 1, 4, 4),
        Part(f"{prefix}.2.gate_proj.weight", 2, 0, 4),
        Part(f"{prefix}.2.up_proj.weight", 2, 4, 4),
    ]


def test_down() -> None:
    parts = parts_of("model.layers.1.mlp.experts.down_proj", (2, 5, 4), QWEN)
    assert parts == [
        Part(f"model.layers.1.mlp.experts.{i}.down_proj.weight", i, 0, 5) for i in range(2)
    ]


def test_mixtral_has_other_names() -> None:
    prefix = "block_sparse_moe.experts"
    # The module's own name contains none of these names.
    known = {f"model.layers.0.{name}": None for name in MIXTRAL}
    assert parts_of("model.layers.0.mlp.gate.weight", (2, 4), known) == [
        Part("model.layers.0.block_sparse_moe.gate.weight")
    ]
    parts = parts_of("model.layers.0.mlp.experts.gate_up_proj", (2, 2, 4), known)
    assert parts == [
        Part(f"model.layers.0.{prefix}.0.w1.weight", 0, 0, 1),
        Part(f"model.layers.0.{prefix}.0.w3.weight", 0, 1, 1),
        Part(f"model.layers.0.{prefix}.1.w1.weight", 1, 0, 1),
        Part(f"model.layers.0.{prefix}.1.w3.weight", 1, 1, 1),
    ]


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        # One expert more than the engine has.
        ("model.layers.1.mlp.experts.down_proj", (4, 5, 4)),
        # Another layer.
        ("model.layers.2.mlp.experts.down_proj", (3, 5, 4)),
        # Shapes that cannot be a gate and an up of the same size.
        ("model.layers.1.mlp.experts.gate_up_proj", (3, 7, 5)),
        ("model.layers.1.mlp.experts.gate_up_proj", (3, 8)),
        ("model.layers.1.mlp.experts.gate_up_proj", (0, 8, 5)),
        ("model.layers.1.mlp.experts.gate_up_proj_bias", (3, 8, 5)),
        ("model.layers.1.mlp.gate.weight", (3, 8)),
        ("lm_head.weight", (3, 8)),
    ],
)
def test_what_is_made_of_nothing_known(name: str, shape: tuple[int, ...]) -> None:
    assert parts_of(name, shape, QWEN) == []
