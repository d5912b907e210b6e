"""The trainers that ``bench.trainers`` compares: recipe 1 as it is, TRL's and TorchRL's.

Each function trains in the calling process, writes ``log.csv`` with the recipe's columns, and stops
when the held-out score reaches the target or the time is over. All start from the recipe's policy
(weights in float32) and its items, and sample with temperature 1. Packages of the peers are
imported in their functions, so that the others run without them.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import psutil
import torch
from transformers import AutoTokenizer

import sglrl

from .parts import ROOT, Note

sys.path.insert(0, str(ROOT / "examples/recipes"))

import recipe
import sums

NEW_TOKENS, ROWS = 8, 64
"""The most tokens of an answer in recipe 1, and the rows of one backward pass."""
SAMPLING = {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "max_new_tokens": NEW_TOKENS}
CLIP = (0.2, 0.28)
"""The default of ``sglrl.rl.policy_loss``, which the recipe uses."""
_POLL_SECONDS = 0.1


class Finished(Exception):
    """The run reached its target or its time limit."""


class Busy(threading.Thread):
    """Polls how busy the GPU is.

    A poll is NVML's utilization: the share of its last sample period (at most 1 s) during which any
    process ran a kernel.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._end = threading.Event()
        self._polls: list[int] = []

    def run(self) -> None:
        while not self._end.wait(_POLL_SECONDS):
            self._polls.append(torch.cuda.utilization())

    def share(self) -> float | None:
        """Stop, and return the mean from 0 to 1. None without a poll."""
        self._end.set()
        if self.is_alive():
            self.join()
        return statistics.mean(self._polls) / 100 if self._polls else None


class Watch(recipe.Log):
    """A log that ends the run at the target or at the time limit.

    Args:
        chosen: the recipe's options.
        target: the held-out score at which ``write`` raises ``Finished``.
        seconds: the time from step 0 after which ``write`` raises ``Finished``.
        note: shows each row.
    """

    def __init__(self, chosen: Any, target: float, seconds: float, note: Note) -> None:
        super().__init__(chosen.output)
        self.chosen, self.target, self.limit, self.note = chosen, target, seconds, note
        self.busy = Busy()
        self.steps, self.scores, self.rates = 0, [], []
        self.startup_s = self.began = self.ended = 0.0

    def due(self, step: int) -> bool:
        return step % self.chosen.every == 0 or step == self.chosen.steps

    def write(self, step: int, *, heldout: float, **values: float) -> None:
        super().write(step, heldout=heldout, **values)
        self.steps, self.ended = step, time.perf_counter()
        if not math.isnan(heldout):
            self.note(f"step {step}, held-out score {heldout:.3f}")
        if step == 0:
            self.startup_s = time.time() - psutil.Process().create_time()
            self.began = self.ended
            if self.chosen.device == "cuda":
                self._poll()
        else:
            self.rates.append(values["tokens_per_s"])
        if not math.isnan(heldout):
            self.scores.append(heldout)
        if self.scores[-1] >= self.target or self.ended - self.began >= self.limit:
            raise Finished

    def write_step(
        self,
        step: int,
        score: Callable[[], float],
        rewards: list[float],
        meter: Meter,
        **values: float,
    ) -> None:
        """Write the row of a step whose samples are of the current policy, and evaluate if due."""
        self.write(
            step,
            heldout=score() if self.due(step) else math.nan,
            reward=statistics.mean(rewards),
            staleness=0.0,
            tokens_per_s=meter.step_rate(),
            **values,
        )

    def _poll(self) -> None:
        try:
            torch.cuda.utilization()
        except Exception as error:  # NVML has many errors, and its package may be missing
            self.note(f"cannot measure how busy the GPU is: {error}")
        else:
            self.busy.start()

    def figures(self, sampling_tokens_per_s: float | None = None) -> dict[str, Any]:
        """Return the figures of the run. Times are in seconds."""
        return {
            "startup_s": self.startup_s,
            "train_s": self.ended - self.began,
            "steps": self.steps,
            "reached": self.scores[-1] >= self.target,
            "heldout": self.scores[-1],
            "tokens_per_s": statistics.median(self.rates) if self.rates else None,
            "sampling_tokens_per_s": sampling_tokens_per_s,
            "gpu_busy": self.busy.share(),
        }


class Meter:
    """Takes the place of ``model.generate``, and counts its tokens and seconds.

    The tokens of a row end with its first end-of-sequence token, which counts.
    """

    def __init__(self, model: Any) -> None:
        self.plain, self.model = model.generate, model
        self.tokens = self.total_tokens = 0
        self.total_seconds, self.since = 0.0, time.perf_counter()
        model.generate = self

    def __call__(self, *args: Any, input_ids: torch.Tensor, **arguments: Any) -> Any:
        begun = time.perf_counter()
        output = self.plain(*args, input_ids=input_ids, **arguments)
        sequences = output if isinstance(output, torch.Tensor) else output["sequences"]
        sampled = sequences[:, input_ids.shape[1] :]
        ends = torch.as_tensor(self.model.generation_config.eos_token_id, device=sampled.device)
        is_end = torch.isin(sampled, ends).int()
        count = int((is_end.cumsum(1) - is_end == 0).sum())  # also waits for the GPU
        self.total_seconds += time.perf_counter() - begun
        self.tokens, self.total_tokens = self.tokens + count, self.total_tokens + count
        return output

    def step_rate(self) -> float:
        """Return tokens/s since the last call, or since the construction."""
        tokens, since = self.tokens, self.since
        self.tokens, self.since = 0, time.perf_counter()
        return tokens / (self.since - since)

    def rate(self) -> float | None:
        """Return tokens/s of the time in ``generate``. None if it was never called."""
        return self.total_tokens / self.total_seconds if self.total_seconds else None


def rendered(tokenizer: Any, item: dict[str, Any]) -> str:
    """Return the text of an item's prompt."""
    return tokenizer.apply_chat_template(
        item["messages"], tokenize=False, add_generation_prompt=True
    )


def autocast(device: str) -> Any:
    return torch.autocast(device, torch.bfloat16, enabled=device == "cuda")


def evaluate(generate: Any, tokenizer: Any, items: list[dict[str, Any]], device: str) -> float:
    """Return the mean score of 4 samples of each item by the model's own ``generate``."""
    items = [item for item in items for _ in range(4)]
    prompts = [rendered(tokenizer, item) for item in items]
    batch = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
    ids, attention = batch["input_ids"].to(device), batch["attention_mask"].to(device)
    pad = tokenizer.pad_token_id
    with torch.no_grad(), autocast(device):
        sequences = generate(
            input_ids=ids, attention_mask=attention, pad_token_id=pad, top_k=0, **SAMPLING
        )
    texts = tokenizer.batch_decode(sequences[:, ids.shape[1] :], skip_special_tokens=True)
    return statistics.mean(map(sums.exact, items, texts))


async def train_sglrl(
    note: Note, arguments: list[str], target: float, seconds: float
) -> dict[str, Any]:
    """Recipe 1 as it is: SGLang samples while the trainer trains, at most one version behind."""
    chosen = recipe.options("", arguments)
    items, heldout = sums.split(chosen)
    watch = Watch(chosen, target, seconds, note)
    with contextlib.suppress(Finished):
        async with sglrl.launch(chosen.model, **recipe.engine_of(chosen)) as client:
            await recipe.train(client, chosen, sums.agent, items, heldout, log=watch)
    return watch.figures()


def train_trl(note: Note, arguments: list[str], target: float, seconds: float) -> dict[str, Any]:
    """TRL's ``GRPOTrainer`` with its own generation by transformers, without vLLM."""
    from datasets import Dataset
    from transformers import PrinterCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    chosen = recipe.options("", arguments)
    items, heldout = sums.split(chosen)
    watch = Watch(chosen, target, seconds, note)
    tokenizer = AutoTokenizer.from_pretrained(sglrl.local_model(chosen.model))
    model = recipe.Policy(chosen).model
    meter = Meter(model)
    rewards: list[float] = []
    cuda = chosen.device == "cuda"

    def reward(completions: Any, answer: list[str], **_: Any) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        rewards[:] = [
            sums.exact({"answer": right}, text) for right, text in zip(answer, texts, strict=True)
        ]
        return list(rewards)

    score = partial(evaluate, meter.plain, tokenizer, heldout, chosen.device)

    class Writer(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            step = state.global_step
            watch.write_step(step, score, rewards, meter)

    batch = chosen.groups * chosen.samples
    rows = math.gcd(ROWS, batch)
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=reward,
        train_dataset=Dataset.from_list(
            [
                {"prompt": item["messages"], "answer": item["answer"]}
                for _, item in zip(range(chosen.steps * chosen.groups), items, strict=False)
            ]
        ),
        args=GRPOConfig(
            output_dir=str(chosen.output / "trl"),
            max_steps=chosen.steps,
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=batch // rows,
            num_generations=chosen.samples,
            shuffle_dataset=False,
            max_completion_length=NEW_TOKENS,
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            beta=0.0,
            epsilon=CLIP[0],
            epsilon_high=CLIP[1],
            loss_type="dapo",
            learning_rate=chosen.lr,
            lr_scheduler_type="constant",
            optim="adamw_torch",
            adam_beta1=0.9,
            adam_beta2=0.99,
            weight_decay=0.01,
            max_grad_norm=1.0,
            gradient_checkpointing=False,
            bf16=cuda,
            use_cpu=not cuda,
            seed=chosen.seed,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        ),
        callbacks=[Writer()],
    )
    trainer.remove_callback(PrinterCallback)
    with contextlib.suppress(Finished):
        watch.write(0, heldout=score())
        meter.step_rate()
        trainer.train()
    return watch.figures(meter.rate())


def train_torchrl(
    note: Note, arguments: list[str], target: float, seconds: float
) -> dict[str, Any]:
    """TorchRL's collector, ``ChatEnv``, ``MCAdvantage`` and ``GRPOLoss``, on transformers.

    TorchRL's own path to SGLang cannot train on one GPU: its ``SGLangWeightSyncScheme`` forms an
    NCCL group of the trainer and the server, and NCCL rejects two processes of one GPU ("Duplicate
    GPU detected"). So ``TransformersWrapper`` samples with the trained model itself.
    """
    from torchrl.collectors.llm import LLMCollector
    from torchrl.data import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement
    from torchrl.envs import StepCounter, Transform
    from torchrl.envs.llm import ChatEnv
    from torchrl.modules.llm.policies import TransformersWrapper
    from torchrl.objectives.llm import GRPOLoss, MCAdvantage

    chosen = recipe.options("", arguments)
    items, heldout = sums.split(chosen)
    watch = Watch(chosen, target, seconds, note)
    tokenizer = AutoTokenizer.from_pretrained(sglrl.local_model(chosen.model))
    policy = recipe.Policy(chosen)
    model = policy.model.eval()
    # TransformersWrapper takes padding for the end of the sequence if both are the same token, and
    # its loss then leaves out the end.
    if tokenizer.pad_token_id == tokenizer.eos_token_id:
        tokenizer.pad_token = tokenizer.unk_token
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    meter = Meter(model)
    batch = chosen.groups * chosen.samples
    answers: dict[str, str] = {}

    class Sampler(TransformersWrapper):  # type: ignore[misc]
        """Return the logprob of each sampled token. TorchRL 0.14 sets the first one to 0."""

        @classmethod
        def _log_probs_generate(cls, tokens: Any, logits: Any, **_: Any) -> Any:
            logprobs = logits.float().log_softmax(-1)
            return logprobs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1), logits

    class Exact(Transform):  # type: ignore[misc]
        def _step(self, tensordict: Any, next_tensordict: Any) -> Any:
            text = tensordict["text"]
            found = [
                sums.exact({"answer": answers[prompt]}, response.removesuffix(tokenizer.eos_token))
                for prompt, response in zip(text.prompt, text.response, strict=True)
            ]
            next_tensordict["reward"] = torch.tensor(found).reshape(-1, 1, 1)
            return next_tensordict

    def queries() -> Iterator[dict[str, list[str]]]:
        while True:
            chunk = [next(items) for _ in range(chosen.groups)]
            prompts = [rendered(tokenizer, item) for item in chunk]
            answers.update(zip(prompts, (item["answer"] for item in chunk), strict=True))
            yield {"query": prompts}

    env = ChatEnv.from_dataloader(
        queries(),
        batch_size=(batch,),
        repeats=chosen.samples,
        input_mode="text",
        tokenizer=tokenizer,
        # The query is the rendered prompt.
        template_kwargs={"chat_template": "{{ messages[0]['content'] }}"},
    )
    env = env.append_transform(StepCounter(max_steps=1)).append_transform(Exact())
    buffer = ReplayBuffer(
        storage=LazyStackStorage(batch),
        sampler=SamplerWithoutReplacement(),
        batch_size=math.gcd(ROWS, batch),
        transform=MCAdvantage(grpo_size=chosen.samples, prompt_key="query"),
    )
    wrapped = {"tokenizer": tokenizer, "device": torch.device(chosen.device)}
    sampler = Sampler(
        model, input_mode="text", generate_kwargs={**SAMPLING, "top_k": None}, **wrapped
    )
    collector = LLMCollector(
        env,
        policy=sampler,
        replay_buffer=buffer,
        dialog_turns_per_batch=batch,
        total_dialog_turns=batch * chosen.steps,
    )
    loss = GRPOLoss(
        TransformersWrapper(model, input_mode="tokens", generate=False, **wrapped),
        clip_epsilon=CLIP,
        entropy_bonus=False,
    )

    score = partial(evaluate, meter.plain, tokenizer, heldout, chosen.device)

    with contextlib.suppress(Finished):
        watch.write(0, heldout=score())
        meter.step_rate()
        batches = iter(collector)
        for step in range(1, chosen.steps + 1):
            rewards, total = [], 0.0
            # Autocast keeps converted weights until it ends, so it must end before each update.
            with autocast(chosen.device):
                next(batches)
            parts = list(buffer)
            for part in parts:
                rewards.append(part["next", "reward"].mean().item())
                with autocast(chosen.device):
                    part_loss = loss(with_full_logprobs(part).to(chosen.device)).loss_objective
                (part_loss / len(parts)).backward()
                total += part_loss.item() / len(parts)
            norm = policy.step()
            watch.write_step(step, score, rewards, meter, loss=total, norm=norm)
    return watch.figures(meter.rate())


def with_full_logprobs(batch: Any) -> Any:
    """Add the sampled logprobs of prompt and response, which ``GRPOLoss`` reads.

    ``TransformersWrapper`` returns only those of the response. The prompt has zeros, which the loss
    masks.
    """
    for row in batch.unbind(0):
        logprobs = row["log_probs", "response"]
        prompt = logprobs.new_zeros(len(row["tokens", "full"]) - len(logprobs))
        row["log_probs", "full"] = torch.cat([prompt, logprobs])
    return batch
