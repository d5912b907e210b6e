"""TRL's ``GRPOTrainer`` with sglrl as its rollout engine, on the real SGLang."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import sglrl
from sglrl.integrations.trl import SGLangRollouts, agent_reward
from sglrl.launching.tiny_model import make_model

from .trl_program import distance, number_of_parameters, train_in_two_processes

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

    settings = {"max_completion_length": 12, "save_strategy": "no", **options.pop("settings", {})}
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
            disable_tqdm=True,
            logging_steps=1,
            **settings,
        ),
        train_dataset=Dataset.from_list(
            [{"prompt": prompt, "answer": f"{prompt}!"} for prompt in prompts]
        ),
        processing_class=AutoTokenizer.from_pretrained(model),
        **options,
    )


def logs(trainer: Any) -> list[dict[str, float]]:
    """Return what the trainer logged, by step."""
    return [log for log in trainer.state.log_history if "reward" in log]


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
    # The trainer's correction for the engine's logprobs is on, and has nothing to correct.
    ratios = [log["sampling/importance_sampling_ratio/mean"] for log in logs(trainer)]
    assert ratios == pytest.approx([1.0] * 3, abs=1e-3)
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


def test_other_settings_of_the_trainer(
    client: sglrl.BlockingClient, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM

    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    calls: list[tuple[bool, float, int]] = []
    columns: list[tuple[str, Any]] = []

    def reward(prompts: list[Any], completions: list[Any], answer: list[Any], **_: Any) -> Any:
        columns.extend(zip(prompts, answer, strict=True))
        return [float(len({*completion})) for completion in completions]

    def trainer() -> Any:
        rollouts = SGLangRollouts(client)

        def recorded(prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
            out = rollouts(prompts, trainer)
            is_training = trainer.model.training
            calls.append((is_training, distance(trainer.model, out), client.weight_version))
            return out

        return trainer_of(
            model,
            tmp_path,
            [f"say {i}" for i in range(8)],
            reward_funcs=reward,
            rollout_func=recorded,
            eval_dataset=Dataset.from_list([{"prompt": "say", "answer": "say!"}] * 2),
            settings={
                "num_iterations": 2,
                "gradient_accumulation_steps": 4,
                "steps_per_generation": 2,
                "mask_truncated_completions": True,
                "log_completions": True,
                "num_generations_eval": 1,
                "per_device_eval_batch_size": 1,
                "eval_strategy": "steps",
                "eval_steps": 1,
                "save_strategy": "steps",
                "save_steps": 2,
            },
        )

    first = trainer()
    first.train()
    assert all(prompt + "!" == answer for prompt, answer in columns)
    trained = [version for training, _, version in calls if training]
    evaluated = [version for training, _, version in calls if not training]
    # One generation is enough for four batches. The batches of an evaluation share an update.
    assert len(trained) == len({*trained}) == 3
    assert evaluated == [trained[0] + 1] * 2 + [trained[1] + 1] * 2 + [trained[2] + 1] * 2
    # The weights change without a step, as with load_best_model_at_end.
    first.model.load_state_dict(AutoModelForCausalLM.from_pretrained(model).state_dict())
    first.evaluate()
    assert [version - trained[2] for *_, version in calls[-2:]] == [2, 2]
    trainer().train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert [training for training, *_ in calls[-3:]] == [True, False, False]
    assert max(error for _, error, _ in calls) < 1e-4


def test_the_chat_template_is_the_trainers(client: sglrl.BlockingClient, model: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = "{{ greeting }} {{ messages[0]['content'] }}:"
    rollouts = SGLangRollouts(client)
    rollouts._send_weights = lambda trainer: None
    trainer = fake_trainer(processing_class=tokenizer, chat_template_kwargs={"greeting": "hello"})
    out = rollouts(PROMPTS[:2], trainer)
    assert [tokenizer.decode(ids) for ids in out["prompt_ids"]] == ["hello say 0:", "hello say 1:"]


def test_a_complete_answer_ends_with_its_end_token(client: sglrl.BlockingClient) -> None:
    """The trainer looks at the last token to find truncated completions."""
    rollouts = SGLangRollouts(client)
    rollouts._send_weights = lambda trainer: None
    end = client.tokenizer.eos_token_id
    out = rollouts(["say"], fake_trainer(generation_kwargs={"logit_bias": {end: 100.0}}))
    assert out["completion_ids"] == [[end]]


def test_adapters_are_merged(
    client: sglrl.BlockingClient, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from peft import LoraConfig

    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    rollouts = SGLangRollouts(client)
    distances = []

    def recorded(prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        out = rollouts(prompts, trainer)
        for name, value in trainer.model.state_dict().items():
            assert torch.equal(value, before[name]), name
        distances.append(distance(trainer.model, out))
        with trainer.model.disable_adapter():
            assert distance(trainer.model, out) > 1e-2
        return out

    trainer = trainer_of(
        model,
        tmp_path,
        PROMPTS,
        reward_funcs=lambda completions, **_: [len({*c[0]["content"]}) for c in completions],
        rollout_func=recorded,
        peft_config=LoraConfig(
            target_modules=["q_proj", "up_proj", "embed_tokens"],
            modules_to_save=["lm_head"],
            init_lora_weights=False,
            use_dora=True,
        ),
    )
    trainer.train()
    assert len(distances) == 3
    assert max(distances) < 1e-4


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
    logged = [log["reward"] for log in logs(trainer)]
    means = [sum(out["agent_rewards"]) / len(out["agent_rewards"]) for out in outs]
    assert logged == pytest.approx(means, rel=1e-3)


async def fails(session: sglrl.Session, item: Any) -> float:
    if item[0]["content"] in ("say 3", "fail"):
        raise LookupError("no tool")
    await session.generate(max_new_tokens=2)
    return 1.0


def test_an_agent_that_fails(client: sglrl.BlockingClient) -> None:
    rollouts = SGLangRollouts(client, agent=fails, rollout={"max_failure_rate": None})
    rollouts._send_weights = lambda trainer: None
    with pytest.raises(sglrl.RolloutFailed, match="the agent failed for 1 of 8 prompts"):
        rollouts(PROMPTS, fake_trainer())
    with pytest.raises(LookupError, match="no tool"):
        rollouts([[{"role": "user", "content": "fail"}]] * 8, fake_trainer())


def fake_trainer(**changes: Any) -> Any:
    """Return what ``SGLangRollouts`` reads of a trainer before it sends weights."""
    args = SimpleNamespace(
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        min_p=None,
        repetition_penalty=1.0,
        max_completion_length=8,
        generation_kwargs=changes.pop("generation_kwargs", None),
        use_vllm=changes.pop("use_vllm", False),
        vllm_importance_sampling_correction=False,
    )
    values = {
        "args": args,
        "use_vllm": False,
        "model": torch.nn.Linear(1, 1),
        "chat_template_kwargs": {},
        "processing_class": None,
        "accelerator": SimpleNamespace(num_processes=1, distributed_type="NO"),
        **changes,
    }
    return SimpleNamespace(**values)


PROMPT_TUNING = SimpleNamespace(is_prompt_learning=True)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"use_vllm": True}, r"use_vllm=True\) starts vLLM too"),
        ({"tools": [print]}, r"use SGLangRollouts\(agent=\.\.\.\)"),
        ({"environment_factories": {"a": object}}, r"use SGLangRollouts\(agent=\.\.\.\)"),
        ({"model": SimpleNamespace(peft_config={"a": PROMPT_TUNING})}, "no prompt tuning"),
        ({"model": SimpleNamespace(is_quantized=True)}, "quantized weights are not supported"),
        ({"generation_kwargs": {"top_p": 0.9, "return_sampling_mask": True}}, "takes no masks"),
        ({"generation_kwargs": {"token_ids_logprob": [3]}}, "token_ids_logprob has no effect"),
        ({"generation_kwargs": {"return_hidden_states": True}}, "return_hidden_states has no"),
        ({"generation_kwargs": {"return_routed_experts": True}}, "takes no experts"),
        (
            {
                "model": SimpleNamespace(peft_config={"a": PROMPT_TUNING}),
                "accelerator": SimpleNamespace(distributed_type="DistributedType.FSDP"),
            },
            "adapters of sharded models",
        ),
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


def test_several_processes_share_the_workers(client: sglrl.BlockingClient, model: Path) -> None:
    before = client.weight_version
    kinds = ("whole models on CPUs", "FSDP2 on CPUs")
    lines = train_in_two_processes(model, client.address, *kinds)
    size = number_of_parameters(model)
    for kind, first, total in zip(kinds, (before + 1, before + 3), (2 * size, size), strict=True):
        found = [line for line in lines if line["kind"] == kind]
        assert {line["rank"] for line in found} == {0, 1}
        assert {line["processes"] for line in found} == {2}
        assert len({line["pool"] for line in found}) == 1
        assert sum(line["parameters"] for line in found) == total
        for line in found:
            assert [step["versions"] for step in line["steps"]] == [[first], [first + 1]]
            assert max(step["error"] for step in line["steps"]) < 1e-4
            assert line["steps"][1]["moved"] > 1e-2
