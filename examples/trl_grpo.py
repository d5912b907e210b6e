"""TRL's ``GRPOTrainer``, with the samples of sglrl's engines. Only ``rollout_func`` is new.

``pip install -e '.[sglang,trl]' && python examples/trl_grpo.py [steps]`` runs on a CPU without a
download. A tiny model with random weights learns to repeat four digits.
"""

import os
import random
import sys
import tempfile

# TRL marks rollout_func as experimental.
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback
from trl import GRPOConfig, GRPOTrainer

import sglrl
from sglrl.integrations.trl import SGLangRollouts

MODEL = str(sglrl.tiny_model(characters="0123456789", initializer_range=0.02))


def questions(count):
    chance = random.Random(0)
    for _ in range(count):
        text = "".join(chance.choices("0123456789", k=4))
        yield {"prompt": [{"role": "user", "content": text}], "answer": text}


def reward(completions, answer, **_):
    """Return the share of correct digits of each completion."""
    texts = [completion[0]["content"] for completion in completions]
    found = [
        sum(a == b for a, b in zip(text, digits, strict=False)) / 4
        for text, digits in zip(texts, answer, strict=True)
    ]
    print(f"reward {sum(found) / len(found):.2f}", flush=True)
    return found


def main(steps):
    with tempfile.TemporaryDirectory() as folder, SGLangRollouts(MODEL, device="cpu") as rollouts:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(MODEL, dtype="auto"),
            processing_class=AutoTokenizer.from_pretrained(MODEL),
            reward_funcs=reward,
            train_dataset=Dataset.from_list(list(questions(1000))),
            rollout_func=rollouts,
            args=GRPOConfig(
                output_dir=folder,
                max_steps=steps,
                per_device_train_batch_size=256,
                num_generations=16,
                max_completion_length=4,
                learning_rate=2e-3,
                lr_scheduler_type="constant",
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                # The tiny model is trained in float32 on the CPU.
                use_cpu=True,
                bf16=False,
            ),
        )
        trainer.remove_callback(PrinterCallback)  # It prints all of TRL's metrics.
        trainer.train()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 80)
