"""TRL's ``GRPOTrainer`` with sglrl as its rollout engine, on the real SGLang."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import sglrl
from sglrl.api.tiny_model import make_model
from sglrl.integrations.trl import SGLangRollouts, agent_reward

from .trl_program import distance

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
PROMPTS = [[{"role": "user", "content": f"say {i}"}] for i in range(8)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "qwen3")


@pytest.fixture(scope="module")
def client(model: Path) -> Iterator[sglrl.BlockingClient]:
    with sglrl.blocking(model, device="cpu") as client:
        yield client


def trainer_of(model: Path, folder: Path, prompts: list[Any], **options: Any) -> Any:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    settings = {"max_completion_length": 12, **options.pop("settings", {})}
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model),
        args=GRPOConfig(
            output_dir=str(folder),
            per_device_train_batch_size=8,
            num_generations=4,
            max_steps=3,
            learning_rate=1e-2,
            report_to=[],
            use_cpu=True,
            bf16=False,
            save_strategy="no",
            disable_tqdm=True,
            logging_steps=1,
            **settings,
        ),
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
        processing_class=AutoTokenizer.from_pretrained(model),
        **options,
    )


def test_it_trains_on_what_its_own_weights_sampled(
    client: sglrl.BlockingClient, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    rollouts = SGLangRollouts(client)
    before = client.weight_version
    distances, versions, texts = [], [], []

    def recorded(prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        out = rollouts(prompts, trainer)
        distances.append(distance(trainer.model, out))
        texts.extend(prompts)
        tokenizer = client.tokenizer
        for prompt, ids in zip(prompts, out["prompt_ids"], strict=True):
            assert ids == tokenizer.apply_chat_template(
                prompt, add_generation_prompt=True, return_dict=False
            )
        return out

    def reward(completions: list[Any], policy_versions: list[int], **_: Any) -> list[float]:
        versions.append({*policy_versions})
        return [float(len({*completion[0]["content"]})) for completion in completions]

    trainer = trainer_of(
        model,
        tmp_path,
        PROMPTS,
        reward_funcs=reward,
        rollout_func=recorded,
        settings={"temperature": 1.0},
    )
    trainer.train()
    assert max(distances) < 1e-4
    assert versions == [{before + 1}, {before + 2}, {before + 3}]
    assert len(texts) == 3 * 8
    # Each prompt has four completions, and so a comparison.
    assert all(texts.count(text) % 4 == 0 for text in texts)
    # The trainer has moved: with the weights of the first step the distance would be large.
    ids = [5, 6, 7, 8]
    with torch.no_grad():
        rows = torch.log_softmax(trainer.model(torch.tensor([ids])).logits[0].float(), -1)
    last = client.score(ids)[1:]
    assert abs(float(rows[0, ids[1]]) - float(last[0])) > 1e-4
    client.update_weights(trainer.model)
    torch.testing.assert_close(
        rows[torch.arange(3), ids[1:]], torch.tensor(client.score(ids)[1:]), atol=1e-4, rtol=0
    )


async def guess(session: sglrl.Session, item: Any) -> float:
    first = await session.generate(max_new_tokens=4)
    session.observe({"role": "tool", "content": "no"})
    second = await session.generate(max_new_tokens=4)
    return float(len(first.text) + len(second.text))


def test_an_agent_plays_several_turns(
    client: sglrl.BlockingClient, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    rollouts = SGLangRollouts(client, agent=guess, rollout={"concurrency": 4})
    outs: list[dict[str, list[Any]]] = []

    def recorded(prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        outs.append(rollouts(prompts, trainer))
        return outs[-1]

    trainer = trainer_of(
        model,
        tmp_path,
        PROMPTS,
        reward_funcs=agent_reward,
        rollout_func=recorded,
        settings={"max_completion_length": 64},
    )
    trainer.train()
    assert len(outs) == 3
    decode = client.tokenizer.decode
    for out in outs:
        for ids, mask, logprobs in zip(
            out["completion_ids"], out["env_mask"], out["logprobs"], strict=True
        ):
            observed = [token for token, own in zip(ids, mask, strict=True) if not own]
            assert "<|im_start|>tool\nno<|im_end|>" in decode(observed)
            assert 2 <= sum(mask) <= 8
            assert {lp for lp, own in zip(logprobs, mask, strict=True) if not own} == {0.0}
    logged = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    means = [sum(out["agent_rewards"]) / len(out["agent_rewards"]) for out in outs]
    assert logged == pytest.approx(means, rel=1e-3)


async def fails(session: sglrl.Session, item: Any) -> float:
    if item[0]["content"] in ("say 3", "fail"):
        raise LookupError("no tool")
    await session.generate(max_new_tokens=2)
    return 1.0


def test_an_agent_that_fails(client: sglrl.BlockingClient) -> None:
    rollouts = SGLangRollouts(client, agent=fails, rollout={"max_failure_rate": None})
    rollouts._client, rollouts._step = client, 0
    with pytest.raises(sglrl.RolloutFailed, match="the agent failed for 1 of 8 prompts"):
        rollouts(PROMPTS, fake_trainer())
    with pytest.raises(LookupError, match="no tool"):
        rollouts([[{"role": "user", "content": "fail"}]] * 8, fake_trainer())


def fake_trainer(**changes: Any) -> Any:
    """Return what ``SGLangRollouts`` reads of a trainer, for settings that are rejected."""
    args = SimpleNamespace(
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        min_p=None,
        repetition_penalty=1.0,
        max_completion_length=8,
        generation_kwargs=None,
    )
    values = {
        "args": args,
        "model": torch.nn.Linear(1, 1),
        "state": SimpleNamespace(global_step=0),
        "accelerator": SimpleNamespace(num_processes=1),
        **changes,
    }
    return SimpleNamespace(**values)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"use_vllm": True}, r"use_vllm=True\) starts vLLM too"),
        ({"tools": [print]}, r"use SGLangRollouts\(agent=\.\.\.\)"),
        ({"environment_factories": {"a": object}}, r"use SGLangRollouts\(agent=\.\.\.\)"),
        ({"model": SimpleNamespace(peft_config={"default": 1})}, "adapters are not supported"),
    ],
)
def test_settings_that_would_have_no_effect(
    client: sglrl.BlockingClient, changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(sglrl.UsageError, match=says):
        SGLangRollouts(client)(PROMPTS, fake_trainer(**changes))


def test_arguments_that_would_have_no_effect(client: sglrl.BlockingClient) -> None:
    with pytest.raises(sglrl.UsageError, match="replicas= has no effect"):
        SGLangRollouts(client, replicas=2)
    with pytest.raises(sglrl.UsageError, match="agent is None"):
        SGLangRollouts(client, rollout={"timeout": 1})
    with pytest.raises(sglrl.UsageError, match="no worker has started"):
        _ = SGLangRollouts("model").client


@pytest.mark.timeout(300)
def test_several_processes_share_the_workers(model: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            "2",
            "--standalone",
            "-m",
            f"{__package__}.trl_program",
            str(model),
        ],
        cwd=Path(__file__).parent.parent,
        env={**os.environ, "TRL_EXPERIMENTAL_SILENCE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=290,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"rank"')]
    assert len(lines) == 2, done.stderr
    assert {line["rank"] for line in lines} == {0, 1}
    assert {line["processes"] for line in lines} == {2}
    assert len({line["pool"] for line in lines}) == 1
    for line in lines:
        assert [versions for versions, _ in line["steps"]] == [[1], [2]]
        assert max(distance for _, distance in line["steps"]) < 1e-4
