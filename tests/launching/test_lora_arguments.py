"""The arguments of ``launch`` for adapters are checked before a worker starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import sglrl
from sglrl.core.adapters import MODULES
from sglrl.launching.lora_arguments import take_adapters

BOTH: dict[str, Any] = {"max_lora_rank": 8, "lora_target_modules": ["q_proj"]}


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 3, "lora_alpha": 4}))
    name = "base_model.model.model.layers.0.mlp.up_proj.lora_{}.weight"
    tensors = {name.format("A"): torch.ones(3, 8), name.format("B"): torch.ones(8, 3)}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    return tmp_path


def test_nothing_is_asked_for() -> None:
    for args in ({}, {"enable_lora": False}, {"max_loras_per_batch": 8, "lora_paths": None}):
        assert take_adapters(args) == {}
        assert not args.get("enable_lora")
        assert "lora_paths" not in args


def test_names_of_modules() -> None:
    for given in (["all"], ["all-linear"], [*MODULES]):
        args = {"enable_lora": True, "max_lora_rank": 4, "lora_target_modules": given}
        assert take_adapters(args) == {}
        assert {*args["lora_target_modules"]} == {*MODULES}


def test_folders_say_what_they_need(adapter: Path) -> None:
    for given in (
        {"a": adapter},
        [f"a={adapter}"],
        [{"lora_name": "a", "lora_path": str(adapter), "pinned": False}],
    ):
        args: dict[str, Any] = {"lora_paths": given}
        assert take_adapters(args) == {"a": adapter}
        assert args == {
            "enable_lora": True,
            "max_lora_rank": 3,
            "lora_target_modules": ["up_proj"],
        }
    args = {"lora_paths": [str(adapter)], **BOTH}
    assert take_adapters(args) == {str(adapter): adapter}
    assert (args["max_lora_rank"], args["lora_target_modules"]) == (8, ["q_proj"])


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "neither": ({"enable_lora": True}, "needs max_lora_rank= and lora_target_modules="),
    "no modules": ({"enable_lora": True, "max_lora_rank": 8}, "lora_target_modules="),
    "not enabled": ({"max_lora_rank": 8}, "max_lora_rank=8 needs enable_lora=True"),
    "not enabled, backend": ({"lora_backend": "triton"}, "needs enable_lora=True"),
    "disabled": ({"enable_lora": False, "lora_paths": {"a": "x"}}, "enable_lora is False"),
    "rank": ({"enable_lora": True, **BOTH, "max_lora_rank": 0}, "max_lora_rank must be at least 1"),
    "rank type": ({"enable_lora": True, **BOTH, "max_lora_rank": "8"}, "max_lora_rank must be int"),
    "modules": (
        {"enable_lora": True, **BOTH, "lora_target_modules": ["embed_tokens", "q_proj"]},
        "lora_target_modules has embed_tokens; adapters can change q_proj",
    ),
    "batch": ({"enable_lora": True, **BOTH, "max_loras_per_batch": 0}, "must be at least 1, got 0"),
    "loaded": (
        {"enable_lora": True, **BOTH, "max_loaded_loras": 2},
        "max_loaded_loras=2 is less than max_loras_per_batch=8",
    ),
    "backend": ({"enable_lora": True, **BOTH, "lora_backend": "csgmv"}, "needs a GPU"),
    "paths": ({"lora_paths": "folder"}, "lora_paths must map names to folders"),
    "pinned": (
        {"lora_paths": [{"lora_name": "a", "lora_path": "b", "pinned": True}]},
        "no adapter can be pinned",
    ),
    "twice": ({"lora_paths": ["a=x", "a=y"]}, "lora_paths has the name 'a' twice"),
    "no folder": ({"lora_paths": {"a": "/nowhere"}}, "/nowhere has no adapter_config.json"),
    "overlap": ({"enable_lora_overlap_loading": True}, "is not supported: workers prepare"),
    "experts": ({"lora_use_virtual_experts": True}, "adapt no experts"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments(case: str) -> None:
    arguments, text = WRONG[case]
    with pytest.raises(sglrl.UsageError, match=text):
        sglrl.launch("tiny", device="cpu", **arguments)
