"""SGLangWrapper in TorchRL's collectors, transforms and losses, with a real engine."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.collectors.llm import LLMCollector
from torchrl.data import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement, Unbounded
from torchrl.data.llm import History
from torchrl.envs import StepCounter, Transform
from torchrl.envs.llm import ChatEnv
from torchrl.envs.llm.transforms import KLRewardTransform as TorchRLKLRewardTransform
from torchrl.envs.llm.transforms.kl import RetrieveKL, RetrieveLogProb
from torchrl.modules.llm.policies import ChatHistory, Text, TransformersWrapper
from torchrl.objectives.llm import CISPOLoss, GRPOLoss, MCAdvantage
from torchrl.objectives.llm.grpo import DAPO

import sglrl
from sglrl.integrations.torchrl import (
    AsyncSGLang,
    KLRewardTransform,
    SGLangWeightSyncScheme,
    SGLangWrapper,
    get_sglang_model_metadata,
)
from sglrl.launching.tiny_model import make_model

pytestmark = [
    # These warnings come from TorchRL itself.
    pytest.mark.filterwarnings("ignore:size_average and reduce args:UserWarning"),
    pytest.mark.filterwarnings("ignore:The env passed to LLMCollector:FutureWarning"),
]
QUERIES = ["one", "two three", "four five six", "seven"]


@pytest.mark.parametrize("buffered", [True, False], ids=["buffer", "yielded"])
def test_collects_conversations(buffered: bool, pool: sglrl.BlockingClient) -> None:
    policy = SGLangWrapper(pool, generate_kwargs={"max_new_tokens": 4})
    # An environment may have a device, or none.
    device = torch.device("cpu") if buffered else None
    env = ChatEnv.from_dataloader([{"query": QUERIES}], batch_size=(4,), device=device)
    env = env.append_transform(EvenDigits())
    storage = ReplayBuffer(storage=LazyStackStorage(8)) if buffered else None
    collector = LLMCollector(
        env, policy=policy, dialog_turns_per_batch=8, total_dialog_turns=8, replay_buffer=storage
    )
    assert policy.collector is collector
    batches = list(collector)
    if storage is None:
        (data,) = batches
        assert data.batch_size == (4, 2)
        data = data.reshape(-1)
    else:
        assert batches == [None]
        data = storage[:]
    assert len(data) == 8
    for row in data.unbind(0):
        before, after = row["history"].prompt, row["next", "history"].prompt
        assert after.role == [*before.role, "assistant"]
        assert after.content == [*before.content, row["text"].response]
        assert row["log_probs"].full.shape == row["tokens"].full.shape


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tokens_that_an_environment_keeps_are_the_prompt(pool: sglrl.BlockingClient) -> None:
    policy = SGLangWrapper(pool, prefer_tokens=True, generate_kwargs={"max_new_tokens": 4})
    env = ChatEnv.with_tokenizer(tokenizer=pool.tokenizer, batch_size=(1,))
    td = env.reset(TensorDict(query=["one"], batch_size=1))
    # These tokens differ from the tokens that the history would give.
    kept = torch.cat([torch.tensor([77, 78]), td[0]["tokens", "prompt"]])
    td[0]["tokens", "prompt"] = kept
    found = policy(td)
    torch.testing.assert_close(found[0]["tokens", "prompt"], kept, check_dtype=False)
    after = env.step(found)["next"]
    assert len(after[0]["tokens", "prompt"]) > len(kept)
    unkept = policy.get_new_version(prefer_tokens=False)(found.exclude("tokens"))
    assert unkept[0]["tokens", "prompt"].tolist() == kept[2:].tolist()


@pytest.mark.parametrize("padded", [True, False], ids=["padded", "ragged"])
def test_a_reference_policy_in_torchrls_transforms(
    padded: bool, pool: sglrl.BlockingClient, hf_model: Any
) -> None:
    chats = [
        [
            {"role": "user", "content": query},
            {"role": "assistant", "content": " ".join(QUERIES[i:])},
        ]
        for i, query in enumerate(QUERIES)
    ]
    td = TensorDict(history=ChatHistory(full=History.from_chats(chats)), batch_size=4).to_lazystack(
        0
    )
    tokenizer = pool.tokenizer
    ours = SGLangWrapper(pool, generate=False, pad_output=padded, log_probs_key="ref_log_probs")
    theirs = TransformersWrapper(
        hf_model,
        tokenizer=tokenizer,
        generate=False,
        pad_output=padded,
        log_probs_key="gen_log_probs",
    )
    scored = RetrieveLogProb(ours, assistant_only=False, tokenizer=tokenizer)(td.copy())
    assert len(scored.get(("ref_log_probs", "full"), as_list=True)) == 4
    with torch.inference_mode():
        found = RetrieveKL(
            gen_model=theirs,
            ref_model=ours,
            assistant_only=False,
            tokenizer=tokenizer,
            gen_log_probs_full_key=("gen_log_probs", "full"),
            ref_log_probs_full_key=("ref_log_probs", "full"),
        )(td.copy())
    # The weights are equal, so the difference is zero at every token.
    for kl in found.get("kl_penalty", as_list=True):
        torch.testing.assert_close(kl, torch.zeros_like(kl), atol=1e-4, rtol=0)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("padded", [True, False], ids=["padded", "ragged"])
def test_the_divergence_from_a_reference_is_a_reward(
    padded: bool, pool: sglrl.BlockingClient, hf_model: Any
) -> None:
    values = {"max_new_tokens": 6}
    policy = SGLangWrapper(pool, pad_output=padded, generate_kwargs=values)
    reference = TransformersWrapper(
        hf_model,
        tokenizer=pool.tokenizer,
        input_mode="tokens",
        generate=False,
        pad_output=padded,
    )

    def step(transform: Any) -> Any:
        env = ChatEnv.from_dataloader([{"query": QUERIES}], batch_size=(4,))
        env = env.append_transform(EvenDigits()).append_transform(transform)
        with torch.no_grad():
            return env.step(policy(env.reset()))

    found = step(KLRewardTransform(reference, coef=0.5))
    masks = found.get(("masks", "all_assistant_mask"), as_list=True)
    scores = found.get(("log_probs", "full"), as_list=True)
    divergences = found["next"].get("kl_penalty", as_list=True)
    references = found["next"].get("ref_log_probs", as_list=True)
    assert padded == (len({len(mask) for mask in masks}) == 1)
    for mask, score, divergence, at in zip(masks, scores, divergences, references, strict=True):
        # The weights are equal. Over the prompt, both are zero.
        expected = (score.masked_fill(~mask, 0) - at[..., 0])[:, None]
        torch.testing.assert_close(divergence, expected)
        torch.testing.assert_close(divergence, torch.zeros_like(divergence), atol=1e-3, rtol=0)
        assert (at[mask] < 0).all()
        assert (at[~mask] == 0).all()
    if not padded:
        # When this works, our class is not needed.
        with pytest.raises(RuntimeError, match="Failed to stack"):
            step(TorchRLKLRewardTransform(reference, coef=0.5))


@pytest.mark.filterwarnings("ignore:use_ray_service:FutureWarning")
def test_the_transform_is_not_a_ray_service() -> None:
    with pytest.raises(ValueError, match="append it to the environment without"):
        KLRewardTransform(use_ray_service=True)


@pytest.mark.parametrize("padded", [True, False], ids=["padded", "ragged"])
@pytest.mark.parametrize("masking", ["sft", "generic"])
@pytest.mark.parametrize("loss_class", [GRPOLoss, DAPO, CISPOLoss])
def test_losses_take_what_is_generated(
    loss_class: Any, masking: str, padded: bool, pool: sglrl.BlockingClient, hf_model: Any
) -> None:
    values = {"max_new_tokens": 8, "stop_token_ids": range(100), "n": 2}
    policy = SGLangWrapper(pool, input_mode="text", pad_output=padded, generate_kwargs=values)
    batch = policy(TensorDict(text=Text(prompt=QUERIES), batch_size=4)).view(-1)
    batch["advantage"] = torch.randn(8, 1, 1)
    actor = TransformersWrapper(
        hf_model,
        tokenizer=pool.tokenizer,
        input_mode="tokens",
        generate=False,
        pad_output=padded,
    )
    # DAPO needs two clipping thresholds.
    loss = loss_class(actor, masking_strategy=masking, clip_epsilon=(0.2, 0.28))(batch)
    assert loss.mean(reduce=True).isfinite()
    assert loss.ESS > 0.99
    assert loss.kl_approx.abs() < 1e-4


class EvenDigits(Transform):  # type: ignore[misc]
    """Rewards a response with the share of its characters that are even digits."""

    def _step(self, tensordict: Any, next_tensordict: Any) -> Any:
        shares = [sum(c in "02468" for c in text) / 4 for text in tensordict["text"].response]
        next_tensordict["reward"] = torch.tensor(shares).reshape(-1, 1, 1)
        return next_tensordict

    def transform_reward_spec(self, reward_spec: Any) -> Any:
        reward_spec["reward"] = Unbounded((*self.parent.batch_size, 1, 1))
        return reward_spec


def test_the_documentations_blocks_run(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the blocks in order. Only the model and the number of generated tokens differ."""
    from transformers import AutoModelForCausalLM

    text = (Path(__file__).parents[2] / "docs" / "torchrl.md").read_text()
    for long, short in (('"max_new_tokens": 512', '"max_new_tokens": 4'), ("64_000", "64")):
        assert long in text
        text = text.replace(long, short)
    service = AsyncSGLang.from_pretrained(str(tiny), device="cpu")
    monkeypatch.setattr(AsyncSGLang, "from_pretrained", lambda name, **kwargs: service)
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype="auto").eval()
    tokenizer = service.client.tokenizer
    actor = TransformersWrapper(model, tokenizer=tokenizer, input_mode="tokens", generate=False)
    env = ChatEnv.from_dataloader([{"query": QUERIES}] * 64, batch_size=(8,), repeats=2)
    names: dict[str, Any] = {
        "env": env.append_transform(StepCounter(max_steps=1)).append_transform(EvenDigits()),
        "buffer": ReplayBuffer(
            storage=LazyStackStorage(64),
            sampler=SamplerWithoutReplacement(),
            batch_size=64,
            transform=MCAdvantage(grpo_size=2, prompt_key="query"),
        ),
        "model": model,
        "loss_function": GRPOLoss(actor),
        "optimizer": torch.optim.SGD(model.parameters(), lr=1e-3),
    }
    try:
        blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
        assert len(blocks) == 4
        for block in blocks[:-1]:
            exec(block, names)
            assert service.client.verify_weights(model) == []
        assert service.client.weight_version == names["collector"].policy_version == 2
        exec(blocks[-1], names)
    finally:
        service.shutdown()
    for ended in (names["service"], names["other"]):
        with pytest.raises(RuntimeError, match="shut down"):
            ended.generate("Hello")


def test_grpo_learns(tmp_path: Path) -> None:
    """TorchRL's own training loop learns with our sampler and our weight updates.

    The environment, collector, buffer, advantage, loss and trained policy are TorchRL's.
    """
    from transformers import AutoModelForCausalLM

    # The reward may drop during a run, and recovers.
    group, queries, steps = 8, 4, 12
    batch_size = group * queries
    torch.manual_seed(0)
    chance = random.Random(0)
    folder = make_model(tmp_path / "digits", characters="0123456789", initializer_range=0.02)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    service = AsyncSGLang.from_pretrained(str(folder), device="cpu")
    try:
        policy = SGLangWrapper(service, input_mode="text", generate_kwargs={"max_new_tokens": 4})
        tokenizer = policy.tokenizer
        env = ChatEnv.from_dataloader(
            [
                {"query": ["".join(chance.choices("0123456789", k=2)) for _ in range(queries)]}
                for _ in range(2 * steps)
            ],
            batch_size=(batch_size,),
            repeats=group,
            input_mode="text",
            tokenizer=tokenizer,
            template_kwargs={"chat_template": tokenizer.chat_template},
        )
        env = env.append_transform(StepCounter(max_steps=1)).append_transform(EvenDigits())
        buffer = ReplayBuffer(
            storage=LazyStackStorage(batch_size),
            sampler=SamplerWithoutReplacement(),
            batch_size=batch_size,
            transform=MCAdvantage(grpo_size=group, prompt_key="query"),
        )
        collector = LLMCollector(
            env,
            policy=policy,
            replay_buffer=buffer,
            dialog_turns_per_batch=batch_size,
            total_dialog_turns=batch_size * steps,
            track_policy_version=True,
        )
        sender = SGLangWeightSyncScheme(service, device="cpu").create_sender()
        sender.register_model(model)
        sender.register_collector(collector)
        sender.init_all_workers_group(get_sglang_model_metadata(model))
        actor = TransformersWrapper(model, tokenizer=tokenizer, input_mode="tokens", generate=False)
        loss_function = GRPOLoss(actor)
        optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
        rewards = []
        for _ in collector:
            for epoch in range(2):
                for batch in buffer:
                    loss = loss_function(batch)
                    if epoch == 0:
                        # The trainer has the weights that generated the samples.
                        assert loss.ESS > 0.99
                    optimizer.zero_grad()
                    loss.mean(reduce=True).backward()
                    optimizer.step()
            assert (batch["next", "policy_version"] == len(rewards)).all()
            rewards.append(float(batch["next", "reward"].mean()))
            buffer.empty()
            sender.update_weights()
            assert service.client.weight_version == collector.policy_version == len(rewards)
        assert service.client.verify_weights(model) == []
    finally:
        service.shutdown()
    assert len(rewards) == steps
    assert rewards[0] < 0.6
    assert sum(rewards[-2:]) / 2 > 0.8, rewards
