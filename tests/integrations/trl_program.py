"""Train with TRL in two processes, and print the samples' policy versions and logprob errors.

Arguments: the folder of the model, the address of its pool, and the kinds of training, which are
names of ``KINDS``. The processes are forks, so torch and transformers are imported once.
"""

from __future__ import annotations

import copy
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from sglrl.integrations.trl import SGLangRollouts

CPU = {"use_cpu": True, "bf16": False}
FSDP = {"transformer_layer_cls_to_wrap": "Qwen3DecoderLayer"}
ZERO = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "bf16": {"enabled": True},
    "zero_allow_untested_optimizer": True,
}
KINDS: dict[str, dict[str, Any]] = {
    "whole models on CPUs": CPU,
    "FSDP2 on CPUs": CPU,
    "whole models": {},
    "FSDP1": {"fsdp": True, "fsdp_config": {"version": 1, **FSDP}},
    "FSDP2": {"fsdp": True, "fsdp_config": {"version": 2, **FSDP}},
    "ZeRO-2": {"deepspeed": {**ZERO, "zero_optimization": {"stage": 2}}},
    "ZeRO-3": {
        "deepspeed": {
            **ZERO,
            "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
        }
    },
}
"""Arguments of ``GRPOConfig``."""


def distance(model: Any, out: dict[str, list[Any]]) -> float:
    """Return the largest difference between the engine's logprobs and those of ``model``."""
    worst = 0.0
    device = next(model.parameters()).device
    for prompt, completion, logprobs in zip(
        out["prompt_ids"], out["completion_ids"], out["logprobs"], strict=True
    ):
        with torch.no_grad():
            ids = torch.tensor([prompt + completion], device=device)
            logits = model(ids).logits[0, len(prompt) - 1 : -1]
        rows = torch.log_softmax(logits.float(), -1).cpu()
        chosen = rows.gather(1, torch.tensor(completion)[:, None])[:, 0]
        worst = max(worst, float((chosen - torch.tensor(logprobs)).abs().max()))
    return worst


def use_fsdp2_on_cpus() -> None:
    """Make accelerate shard models on CPUs. By itself, it does this only on GPUs."""
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    original = AcceleratorState.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self.distributed_type is DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.FSDP
            self.fsdp_plugin = FullyShardedDataParallelPlugin(
                fsdp_version=2,
                auto_wrap_policy="transformer_based_wrap",
                cpu_ram_efficient_loading=False,
            )

    AcceleratorState.__init__ = init


def callable_model(trainer: Any, kind: str, untrained: Any) -> Any:
    """Return a model with the trainer's weights that can be called between its steps.

    DeepSpeed's next backward pass fails after another forward pass of a ZeRO-3 model, so that one
    is copied.
    """
    if kind != "ZeRO-3":
        return trainer.model_wrapped
    import deepspeed

    copied = copy.deepcopy(untrained)
    with deepspeed.zero.GatheredParameters(list(trainer.model.parameters())):
        copied.load_state_dict(trainer.model.state_dict())
    return copied


def train(folder: str, address: str, kind: str) -> dict[str, Any]:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    steps: list[dict[str, Any]] = []
    rollouts = SGLangRollouts(address)
    untrained = AutoModelForCausalLM.from_pretrained(folder)

    def recorded(prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        out = rollouts(prompts, trainer)
        untrained.to(trainer.accelerator.device)
        steps.append(
            {
                "versions": sorted(set(out["policy_versions"])),
                "error": distance(callable_model(trainer, kind, untrained), out),
                "moved": distance(untrained, out),
            }
        )
        return out

    def reward(completions: list[Any], **_: Any) -> list[float]:
        return [float(len(set(completion[0]["content"]))) for completion in completions]

    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder),
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=4,
            num_generations=4,
            max_completion_length=8,
            max_steps=2,
            learning_rate=1e-2,
            report_to=[],
            gradient_checkpointing=False,
            save_strategy="no",
            disable_tqdm=True,
            **KINDS[kind],
        ),
        train_dataset=Dataset.from_list(
            [{"prompt": [{"role": "user", "content": f"say {i}"}]} for i in range(8)]
        ),
        processing_class=AutoTokenizer.from_pretrained(folder),
        rollout_func=recorded,
    )
    trainer.train()
    rollouts.close()
    # Given a model, the main process starts the workers, and the other process connects to them.
    with SGLangRollouts("any", engine="fake", progress=False) as started:
        started._client = started._start(trainer.accelerator)
        pool = started.client.address
        trainer.accelerator.wait_for_everyone()
    return {
        "kind": kind,
        "rank": trainer.accelerator.process_index,
        "processes": trainer.accelerator.num_processes,
        "parameters": sum(map(local_size, trainer.model.parameters())),
        "pool": pool,
        "steps": steps,
    }


def local_size(parameter: Any) -> int:
    """Return how many elements of a parameter this process has."""
    if hasattr(parameter, "ds_tensor"):  # DeepSpeed's ZeRO-3
        return int(parameter.ds_tensor.numel())
    return int((parameter.to_local() if hasattr(parameter, "to_local") else parameter).numel())


def number_of_parameters(folder: Path) -> int:
    from transformers import AutoModelForCausalLM

    return sum(part.numel() for part in AutoModelForCausalLM.from_pretrained(folder).parameters())


def train_in_two_processes(folder: Path, address: str, *kinds: str) -> list[dict[str, Any]]:
    """Run this program, and return what each process of each kind printed."""
    done = subprocess.run(
        [sys.executable, "-m", __name__, str(folder), address, *kinds],
        cwd=Path(__file__).parent.parent,
        env={**os.environ, "TRL_EXPERIMENTAL_SILENCE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=290,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"kind"')]
    assert len(lines) == 2 * len(kinds), done.stderr
    return lines


def main() -> None:
    folder, address, *kinds = sys.argv[1:]
    if all("use_cpu" in KINDS[kind] for kind in kinds):
        # Import once, before the forks. On GPUs this may initialize CUDA, which must not fork.
        from transformers import Qwen3ForCausalLM  # noqa: F401
        from trl import GRPOTrainer  # noqa: F401

    for kind in kinds:
        port = str(free_port())
        children = []
        for rank in ("0", "1"):
            child = os.fork()
            if child == 0:
                os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
                os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
                if kind == "FSDP2 on CPUs":
                    use_fsdp2_on_cpus()
                line = train(folder, address, kind)
                # One write, so that the lines of the processes do not mix.
                os.write(1, f"{json.dumps(line)}\n".encode())
                os._exit(0)
            children.append(child)
        for child in children:
            os.waitpid(child, 0)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main()
