"""TorchRL's GRPO recipe (sota-implementations/grpo) starts our engine with its own settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sglrl.integrations.torchrl import AsyncSGLang, SGLangWeightSyncScheme, SGLangWrapper

SETTINGS: dict[str, dict[str, Any]] = {
    "gsm8k": {"disable_overlap_schedule": False, "gpu_memory_utilization": 0.9, "max_tokens": 1024},
    "ifeval": {"gpu_memory_utilization": 0.9, "max_tokens": 2048},
    "math": {"gpu_memory_utilization": 0.8, "max_tokens": 2048},
    "countdown": {"gpu_memory_utilization": 0.9, "max_tokens": 512},
}
"""The values of ``inference_model`` in config/grpo_*.yaml that differ.

ifeval has ``num_devices: 2``. A CPU runs a model in one process, so this test uses 1.
"""


def engine_arguments(config: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that ``_get_sglang_inference_model`` of grpo_utils.py makes."""
    found = {
        "tp_size": 1,
        "mem_fraction_static": config["gpu_memory_utilization"],
        "enable_fp32_lm_head": False,
        "dtype": "bfloat16",
        "disable_cuda_graph": False,
        "disable_piecewise_cuda_graph": False,
        "disable_radix_cache": False,
    }
    if "disable_overlap_schedule" in config:
        found["disable_overlap_schedule"] = config["disable_overlap_schedule"]
    return found


@pytest.mark.parametrize("name", SETTINGS)
def test_the_recipe_starts_the_engine(name: str, tiny: Path) -> None:
    config = SETTINGS[name]
    service = AsyncSGLang.from_pretrained(
        model_name=str(tiny), device="cpu", **engine_arguments(config)
    )
    try:
        policy = SGLangWrapper(
            service,
            input_mode="history",
            chat_template_name="qwen",
            return_log_probs=True,
            pad_output=False,
            generate_kwargs={
                "max_new_tokens": config["max_tokens"],
                "temperature": 1.0,
                "top_p": 1.0,
            },
        )
        assert policy.client is service.client
        assert len(service.generate("Hello", max_new_tokens=3, ignore_eos=True)["output_ids"]) == 3
        scheme = SGLangWeightSyncScheme(
            server_url=service.server_url,
            master_address=service.get_master_address(),
            master_port=service.get_master_port(),
            num_gpus=service.get_tp_size() * service.get_dp_size(),
            strategy="state_dict",
            device=0,
        )
        sender = scheme.create_sender()
        sender.init_all_workers_group(service.get_model_metadata())
        sender.shutdown()
        assert {dtype for dtype, _ in service.get_model_metadata().values()} == {torch.bfloat16}
    finally:
        service.shutdown()
