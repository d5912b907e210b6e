"""One step of TorchRL's GRPO recipe (sota-implementations/grpo) with its own settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.collectors.llm import LLMCollector
from torchrl.data import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement, Unbounded
from torchrl.envs import StepCounter, Transform
from torchrl.envs.llm import ChatEnv
from torchrl.modules.llm.policies import TransformersWrapper
from torchrl.objectives.llm import GRPOLoss, MCAdvantage

from sglrl.integrations.torchrl import (
    AsyncSGLang,
    KLRewardTransform,
    SGLangWeightSyncScheme,
    SGLangWrapper,
)

pytestmark = [
    # These warnings come from TorchRL itself.
    pytest.mark.filterwarnings("ignore:size_average and reduce args:UserWarning"),
    pytest.mark.filterwarnings("ignore:The env passed to LLMCollector:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
]
COMMON: dict[str, Any] = {
    "gpu_memory_utilization": 0.9,
    "lr": 1e-5,
    "weight_decay": 0.0,
    "clip_grad_norm": 1.0,
    "use_kl_to_ref": False,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "gsm8k": {**COMMON, "disable_overlap_schedule": False},
    "ifeval": {**COMMON, "clip_grad_norm": 10.0, "use_kl_to_ref": True},
    "math": {**COMMON, "gpu_memory_utilization": 0.8, "lr": 5e-6, "weight_decay": 0.01},
    "countdown": COMMON,
}
"""The values of config/grpo_*.yaml that differ.

The recipe's models and batches are larger, it trains with LoRA, and ifeval has ``num_devices: 2``.
The recipe's environments need a data set from the hub.
"""
GROUP, QUERIES, MAX_TOKENS = 4, ["one", "two three"], 6


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


class CountCharacters(Transform):  # type: ignore[misc]
    """Rewards a response with its number of different characters."""

    def _step(self, tensordict: Any, next_tensordict: Any) -> Any:
        counts = [float(len({*text})) for text in tensordict["text"].response]
        next_tensordict["reward"] = torch.tensor(counts).reshape(-1, 1, 1)
        return next_tensordict

    def transform_reward_spec(self, reward_spec: Any) -> Any:
        reward_spec["reward"] = Unbounded((*self.parent.batch_size, 1, 1))
        return reward_spec


@pytest.mark.parametrize("name", SETTINGS)
def test_one_step_of_the_recipe(name: str, tiny: Path) -> None:
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
            generate_kwargs={"max_new_tokens": MAX_TOKENS, "temperature": 1.0, "top_p": 1.0},
        )
        step(config, tiny, service, policy)
    finally:
        service.shutdown()


def scorer(model: Any, tokenizer: Any) -> TransformersWrapper:
    return TransformersWrapper(
        model,
        tokenizer=tokenizer,
        input_mode="tokens",
        generate=False,
        return_log_probs=True,
        pad_output=False,
        pad_model_input=True,
    )


def step(config: dict[str, Any], tiny: Path, service: Any, policy: SGLangWrapper) -> None:
    from transformers import AutoModelForCausalLM

    def load() -> Any:
        return AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.bfloat16).eval()

    count = GROUP * len(QUERIES)
    env = ChatEnv.from_dataloader([{"query": QUERIES}] * 4, batch_size=(count,), repeats=GROUP)
    env = env.append_transform(StepCounter(max_steps=1)).append_transform(CountCharacters())
    if config["use_kl_to_ref"]:
        # The recipe appends it to the buffer, where TorchRL's class fails.
        reference = scorer(load().requires_grad_(False), policy.tokenizer)
        env = env.append_transform(KLRewardTransform(reference, coef=0.0))
    buffer = ReplayBuffer(
        storage=LazyStackStorage(count),
        sampler=SamplerWithoutReplacement(),
        batch_size=count // 2,
        transform=MCAdvantage(grpo_size=GROUP),
    )
    collector = LLMCollector(
        env,
        policy=policy,
        replay_buffer=buffer,
        dialog_turns_per_batch=count,
        total_dialog_turns=count,
        track_policy_version=True,
    )
    model = load()
    scheme = SGLangWeightSyncScheme(
        server_url=service.server_url,
        master_address=service.get_master_address(),
        master_port=service.get_master_port(),
        num_gpus=service.get_tp_size() * service.get_dp_size(),
        strategy="state_dict",
        device=0,
    )
    sender = scheme.create_sender()
    sender.register_model(model)
    sender.init_all_workers_group(service.get_model_metadata())
    sender.register_collector(collector)
    sender.update_weights()
    loss_function = GRPOLoss(
        scorer(model, policy.tokenizer),
        kl_to_ref_coeff=0.0,
        kl_to_inference_coeff=1e-2,
        entropy_coeff=1e-4,
        masking_strategy="sft",
    )
    optimizer = torch.optim.Adam(
        model.parameters(), lr=config["lr"], weight_decay=config["weight_decay"], eps=1e-5
    )
    for _ in collector:
        for batch in buffer:
            loss = loss_function(batch)
            assert loss.ESS > 0.99
            assert (batch["next", "policy_version"] == 1).all()
            assert (("next", "kl_penalty") in batch.keys(True)) == config["use_kl_to_ref"]
            loss.mean(reduce=True).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config["clip_grad_norm"])
        assert 0 < norm < torch.inf
        optimizer.step()
        sender.update_weights()
    sender.shutdown()
    assert collector.policy_version == service.client.weight_version == 2
    assert service.client.verify_weights(model) == []
    assert TensorDict.from_module(model).isfinite().all()
