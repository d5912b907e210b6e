"""The examples, and the programs of two pages, as a user runs them, for a few steps."""

from __future__ import annotations

import asyncio
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import wandb
from sessions.families import FAMILIES, family_tokenizer
from transformers import AutoModelForCausalLM

from sglrl.launching.tiny_model import make_model, tiny_model

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
CASES: dict[str, tuple[tuple[Any, ...], int, str]] = {
    "first_call": ((), 5, r"text: .*, (length|stop)|chunks: \[.+\]|\d tokens, logprob -\d+\.\d\d"),
    "grpo": ((3,), 3, r"step \d+: reward 0\.\d\d, clipped \d\.\d{3}"),
    "colocated": ((2,), 2, r"step \d+: reward 0\.\d\d, 0\.0 GB, then 0\.0 GB"),
    "async_offpolicy": ((3,), 3, r"step \d+: reward 0\.\d\d, [\d.]+ versions old"),
    "tool_agent": (
        (3,),
        3,
        r"\[\d\.\d+(, \d\.\d+){3}\] <\|user\|>\d\+\d<\|end\|><\|assistant\|>.*",
    ),
    "trainer_process": ((2,), 2, r"weights \d: reward 0\.\d\d"),
    "llm_judge": ((2,), 2, r"What is \d \+ \d\?( [01]\.\d\d){4}"),
    "jsonl_evaluation": (("fake",), 8, r"\d\+\d= \d of 8 samples pass|pass@[1248]: [01]\.\d\d"),
    "trl_grpo": ((2,), 2, r"reward 0\.\d\d"),
    "openai_agent": ((13,), 13, r"step \d+: reward 0\.\d\d"),
    "torchrl_collector": ((2,), 2, r"step \d: reward 0\.\d\d"),
}
"""By name: the arguments of ``main``, the number of lines, and a pattern of a line."""


def test_each_example_is_run_and_fits_a_screen_or_two() -> None:
    found = {path.stem: path for path in EXAMPLES.glob("*.py")}
    assert found.keys() == {*CASES, "tool_calls", "wandb_resume"}
    for path in found.values():
        assert len(path.read_text().splitlines()) < 80


def run(name: str, *args: Any) -> None:
    """Run an example in this process. All share its fork server, which imports SGLang once."""
    example = runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name=name)
    result = example["main"](*args)
    if asyncio.iscoroutine(result):
        asyncio.run(result)


@pytest.mark.timeout(900)
# Import warnings of other packages do not concern the user of an example.
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", CASES)
def test_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, number, pattern = CASES[name]
    run(name, *arguments)
    # TorchRL logs to standard output.
    lines = [line for line in capsys.readouterr().out.splitlines() if "[torchrl]" not in line]
    assert len(lines) == number
    for line in lines:
        assert re.fullmatch(pattern, line), line
    if name == "openai_agent":
        rewards = [float(line.rpartition(" ")[2]) for line in lines]
        # It learns: from 0.08 to 0.25, with little noise.
        assert sum(rewards[-3:]) > 2 * sum(rewards[:3])
    if name == "tool_agent":
        assert any("<|tool|>" in line for line in lines)


@pytest.mark.timeout(900)
def test_the_example_with_calls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_model(tmp_path / "model")
    family_tokenizer(folder, FAMILIES["qwen3"])
    run("tool_calls", str(folder))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    for line in lines:
        # The model is random. After the call that the grammar enforces, it may say anything.
        assert re.fullmatch(
            r"\[[-\d. ]+\] {'well-formed': -?[\d.]+, 'correct': [01]\.0, 'turns': \d+\.0} "
            r"\[{'name': 'eggs_in_a_box', 'arguments': {}}.*\]",
            line,
        ), line


@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("page", ["verl", "prime-rl"])
def test_program_of_page(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / f"docs/{page}.md").read_text(), re.DOTALL)
    code, replaced = re.subn('name = ".*"', f"name = {str(tiny_model())!r}", code)
    assert replaced == 1
    exec(code.replace("steps, groups_per_step = 20, 8", "steps, groups_per_step = 2, 8"), {})
    lines = [line for line in capsys.readouterr().out.splitlines() if "[torchrl]" not in line]
    assert len(lines) == 2
    for version, line in enumerate(lines, 1):
        assert re.fullmatch(rf"version {version}: reward 0\.\d\d", line), line


KILLED = {
    'device="cpu"': 'engine="fake", vocab_size=15',
    "await client.update_weights(model)": "",
    "os.replace(": "__import__('signal').pause() if step == 3 else os.replace(",
}
"""Changes to the program that is killed. It has the fake engine, which starts fast. It hangs when
it has used the third batch and has not yet replaced its checkpoint."""


def test_training_continues_after_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("WANDB_MODE", "offline"), ("WANDB_CONSOLE", "off")):
        monkeypatch.setenv(name, value)
    text = (EXAMPLES / "wandb_resume.py").read_text()
    for before, after in KILLED.items():
        assert before in text
        text = text.replace(before, after)
    script = tmp_path / "script.py"
    script.write_text(text)
    command = [sys.executable, str(script), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        lines = [program.stdout.readline() for _ in range(2)]
        program.kill()
    try:
        run("wandb_resume", tmp_path)
    finally:
        wandb.teardown()
    lines += capsys.readouterr().out.splitlines()
    found = [re.fullmatch(r"step (\d): items \[(.+)\]", line.strip()) for line in lines]
    assert [line and line[1] for line in found] == ["1", "2", "3", "4", "5", "6", "7", "8"]
    items = [int(item) for line in found if line for item in line[2].split(", ")]
    assert sorted(items) == [*range(64)]
    # Both parts belong to one W&B run.
    assert len(list(tmp_path.glob("wandb/offline-run-*-resume-example"))) == 2


def test_both_steps_on_a_batch_are_clipped_around_the_same_policy() -> None:
    """Otherwise the clipped ratio would always be 1, and off-policy learning would not work."""
    example = runpy.run_path(str(EXAMPLES / "async_offpolicy.py"), run_name="async_offpolicy")
    train, seen = example["train"], []
    policy_loss = train.__globals__["policy_loss"]

    def spy(new: Any, old: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append((new.detach().clone(), old.clone()))
        return policy_loss(new, old, *args, **kwargs)

    train.__globals__["policy_loss"] = spy
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(example["MODEL"], dtype="auto")
    ids = torch.randint(0, model.config.vocab_size, (8, 6))
    batch = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids, dtype=torch.bool),
        "advantage": torch.linspace(-1, 1, 8),
        "loss_mask": torch.ones(8, 6, dtype=torch.bool),
    }
    with torch.no_grad():
        batch["logprobs"] = example["logprobs_of"](model, batch)
    train(model, torch.optim.AdamW(model.parameters(), lr=1e-3), Sampled(batch))
    (first, start), (second, again) = seen
    torch.testing.assert_close(first, start)
    torch.testing.assert_close(start, again)
    assert (second - again).abs().max() > 1e-4


class Sampled:
    """Replaces a replay buffer."""

    def __init__(self, batch: dict[str, Any]) -> None:
        self.batch = batch

    def sample(self, size: int) -> dict[str, Any]:
        return self.batch
