"""A TorchRL collector with sglrl's engines. Only the imports from ``sglrl`` are not TorchRL's.

``pip install -e '.[sglang,torchrl]' && python examples/torchrl_collector.py [steps]`` runs on a CPU
without a download. A tiny model with random weights learns to answer with even digits.
"""

import random
import sys

import torch
from torchrl.collectors.llm import LLMCollector
from torchrl.data import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.envs import StepCounter, Transform
from torchrl.envs.llm import ChatEnv
from torchrl.modules.llm.policies import TransformersWrapper
from torchrl.objectives.llm import GRPOLoss, MCAdvantage
from transformers import AutoModelForCausalLM

import sglrl
from sglrl.integrations.torchrl import AsyncSGLang, SGLangWeightSyncScheme, SGLangWrapper

MODEL = str(sglrl.tiny_model(characters="0123456789", initializer_range=0.02))
QUERIES, SAMPLES = 4, 8
BATCH = QUERIES * SAMPLES


class EvenDigits(Transform):
    """Rewards a response with the share of its characters that are even digits."""

    def _step(self, tensordict, next_tensordict):
        shares = [sum(c in "02468" for c in text) / 4 for text in tensordict["text"].response]
        next_tensordict["reward"] = torch.tensor(shares).reshape(-1, 1, 1)
        return next_tensordict


def queries():
    while True:
        yield {"query": ["".join(random.choices("0123456789", k=2)) for _ in range(QUERIES)]}


def main(steps):
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype="auto").eval()
    service = AsyncSGLang.from_pretrained(MODEL, device="cpu")
    policy = SGLangWrapper(service, input_mode="text", generate_kwargs={"max_new_tokens": 4})
    tokenizer = policy.tokenizer
    env = ChatEnv.from_dataloader(
        queries(),
        batch_size=(BATCH,),
        repeats=SAMPLES,
        input_mode="text",
        tokenizer=tokenizer,
        template_kwargs={"chat_template": tokenizer.chat_template},
    )
    env = env.append_transform(StepCounter(max_steps=1)).append_transform(EvenDigits())
    buffer = ReplayBuffer(
        storage=LazyStackStorage(BATCH),
        sampler=SamplerWithoutReplacement(),
        batch_size=BATCH,
        transform=MCAdvantage(grpo_size=SAMPLES, prompt_key="query"),
    )
    turns = {"dialog_turns_per_batch": BATCH, "total_dialog_turns": BATCH * steps}
    collector = LLMCollector(env, policy=policy, replay_buffer=buffer, **turns)
    sender = SGLangWeightSyncScheme(service, device="cpu").create_sender()
    sender.register_model(model)
    sender.register_collector(collector)
    actor = TransformersWrapper(model, tokenizer=tokenizer, input_mode="tokens", generate=False)
    loss, optimizer = GRPOLoss(actor), torch.optim.Adam(model.parameters(), lr=5e-3)
    for step, _ in enumerate(collector):
        for batch in buffer:
            optimizer.zero_grad()
            loss(batch).mean(reduce=True).backward()
            optimizer.step()
        print(f"step {step}: reward {batch['next', 'reward'].mean():.2f}", flush=True)
        sender.update_weights()
    service.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
