"""Train with TRL in several accelerate processes, and print what each of them sampled with.

Arguments: the folder of the model. Run it with ``torch.distributed.run``.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

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


def main() -> None:
    from trl import GRPOConfig, GRPOTrainer

    folder = sys.argv[1]
    steps: list[list[Any]] = []
    rollouts = SGLangRollouts(folder, device="cpu", progress=False)

    def recorded(prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        out = rollouts(prompts, trainer)
        model = trainer.accelerator.unwrap_model(trainer.model)
        steps.append([sorted(set(out["policy_versions"])), distance(model, out)])
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
    address = rollouts.client.address
    trainer.accelerator.wait_for_everyone()
    rollouts.close()
    rank, processes = trainer.accelerator.process_index, trainer.accelerator.num_processes
    line = {"rank": rank, "processes": processes, "pool": address, "steps": steps}
    # One write, so that the lines of the processes do not mix.
    os.write(1, f"{json.dumps(line)}\n".encode())


if __name__ == "__main__":
    main()
