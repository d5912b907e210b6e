"""Train with TRL in two processes, and print the samples' policy versions and logprob errors.

Arguments: the folder of the model, and the address of its pool. The processes are forks, so torch
and transformers are imported once. They train twice: with whole models, and with FSDP2.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
from typing import Any

import torch

from sglrl.integrations.trl import SGLangRollouts


def distance(model: Any, out: dict[str, list[Any]]) -> float:
    """Return the largest difference between the engine's logprobs and those of ``model``."""
    worst = 0.0
    for prompt, completion, logprobs in zip(
        out["prompt_ids"], out["completion_ids"], out["logprobs"], strict=True
    ):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        rows = torch.log_softmax(logits.float(), -1)
        chosen = rows.gather(1, torch.tensor(completion)[:, None])[:, 0]
        worst = max(worst, float((chosen - torch.tensor(logprobs)).abs().max()))
    return worst


def use_fsdp2() -> None:
    """Make accelerate shard models on CPUs. It does this only on GPUs."""
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


def train(folder: str, address: str) -> dict[str, Any]:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    steps: list[list[Any]] = []
    rollouts = SGLangRollouts(address)

    def recorded(prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        out = rollouts(prompts, trainer)
        steps.append([sorted(set(out["policy_versions"])), distance(trainer.model, out)])
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
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            save_strategy="no",
            disable_tqdm=True,
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
        "rank": trainer.accelerator.process_index,
        "processes": trainer.accelerator.num_processes,
        "parameters": sum(part.to_local().numel() for part in shards(trainer.model)),
        "pool": pool,
        "steps": steps,
    }


def shards(model: Any) -> list[Any]:
    return [part for part in model.parameters() if hasattr(part, "to_local")]


def main() -> None:
    # Import everything before the forks.
    from transformers import Qwen3ForCausalLM  # noqa: F401
    from trl import GRPOTrainer  # noqa: F401

    for kind in ("whole", "FSDP2"):
        port = str(free_port())
        children = []
        for rank in ("0", "1"):
            child = os.fork()
            if child == 0:
                os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
                os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
                if kind == "FSDP2":
                    use_fsdp2()
                line = {"kind": kind, **train(*sys.argv[1:])}
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
