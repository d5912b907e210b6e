"""The recipes, for a step or two on a CPU, and what the first one trains on."""

from __future__ import annotations

import csv
import importlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import sglrl

RECIPES = Path(__file__).parents[2] / "examples/recipes"
NAMES = ("sums", "calculator", "distill", "sorting", "fsdp", "verifiers_env")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
STEP = ["--device", "cpu", "--steps", "1", "--groups", "1", "--samples", "2", "--heldout", "2"]


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """Return a function that imports a recipe and sets the arguments of its program."""
    monkeypatch.syspath_prepend(RECIPES)
    monkeypatch.chdir(tmp_path)

    def imported(name: str, *arguments: str) -> Any:
        monkeypatch.setattr("sys.argv", [f"{name}.py", *arguments])
        return importlib.import_module(name)

    return imported


def log_of(folder: str) -> list[dict[str, str]]:
    with Path(folder, "log.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_each_recipe_is_a_small_file() -> None:
    found = {path.stem: path for path in RECIPES.glob("*.py")}
    assert found.keys() == {*NAMES, "recipe", "log"}
    for name in NAMES:
        assert len(found[name].read_text().splitlines()) < 150


def reference_logprobs(model: Any, trajectory: sglrl.Trajectory) -> np.ndarray[Any, Any]:
    """Return the logprob of each token of the response, by transformers."""
    ids = torch.tensor(trajectory.input_ids.astype(np.int64))[None]
    with torch.no_grad():
        rows = model(ids).logits[0].float().log_softmax(-1)
    begin = len(trajectory.prompt_ids)
    return rows[torch.arange(begin - 1, ids.shape[1] - 1), ids[0, begin:]].numpy()


def surrogate(model: Any, groups: list[sglrl.Group]) -> float:
    """Return the loss of GRPO with PPO's clip, computed token by token in float64."""
    total, tokens = 0.0, 0
    for group in groups:
        rewards = np.array([t.reward for t in group.trajectories])
        advantages = (rewards - rewards.mean()) / rewards.std()
        for trajectory, advantage in zip(group.trajectories, advantages, strict=True):
            new = reference_logprobs(model, trajectory).astype(np.float64)
            for logprob, old in zip(new, trajectory.logprobs, strict=True):
                ratio = np.exp(logprob - old)
                total -= min(ratio * advantage, np.clip(ratio, 0.8, 1.28) * advantage)
                tokens += 1
    return total / tokens


def test_what_recipe_1_trains_on(recipe: Any, smollm2: str, monkeypatch: Any) -> None:
    arguments = [
        "--steps",
        "2",
        "--groups",
        "1",
        "--samples",
        "8",
        "--heldout",
        "2",
        "--lr",
        "1e-4",
        "--filter",
        "1",
    ]
    sums = recipe("sums", *arguments, "--device", "cpu", "--engine", '{"dtype": "float32"}')
    shared = importlib.import_module("recipe")
    # The policy of each version, before it was trained on.
    versions: list[Any] = []
    checked = 0
    train = shared.Policy.train

    def checking(self: Any, groups: list[sglrl.Group]) -> dict[str, float]:
        nonlocal checked
        model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
        model.load_state_dict(self.model.state_dict())
        versions.append(model)
        for group in groups:
            assert len({t.reward for t in group.trajectories}) == 2
            for trajectory in group.trajectories:
                assert trajectory.reward in (0, 1)
                assert (trajectory.reward == 1) == (
                    trajectory.text.removesuffix("<|im_end|>").strip() == group.item["answer"]
                )
                # One turn, so all of the response was sampled.
                assert trajectory.loss_mask.all()
                assert len(trajectory.loss_mask) == len(trajectory.response_ids)
                assert set(trajectory.versions) <= {*range(len(versions))}
                # After an update, a running request continues with its KV cache of the old weights,
                # so only the tokens before it have the logprobs of one version.
                first = trajectory.versions == trajectory.versions[0]
                expected = reference_logprobs(versions[trajectory.versions[0]], trajectory)
                np.testing.assert_allclose(
                    trajectory.logprobs[first], expected[first], atol=1e-3, rtol=0
                )
                checked += 1
            assert group.staleness <= 1
        expected_loss = surrogate(model, groups)
        stats: dict[str, float] = train(self, groups)
        assert stats["loss"] == pytest.approx(expected_loss, abs=2e-3)
        assert stats["norm"] > 0
        return stats

    monkeypatch.setattr(shared.Policy, "train", checking)
    sums.main()
    assert checked == 16
    rows = log_of("runs/sums")
    assert [row["step"] for row in rows] == ["0", "1", "2"]
    assert [bool(row["heldout"]) for row in rows] == [True, False, True]
    made = AutoModelForCausalLM.from_pretrained("runs/sums/model", dtype="auto")
    first = AutoModelForCausalLM.from_pretrained(smollm2, dtype="auto")
    assert made.dtype == torch.bfloat16
    assert not torch.equal(made.lm_head.weight, first.lm_head.weight)


def test_items_for_training_are_not_held_out(recipe: Any) -> None:
    sums = recipe("sums")
    assert len(set(sums.PAIRS)) == 400
    assert sums.item((3, 4))["answer"] == "7"
    assert sums.exact({"answer": "7"}, " 7\n") == 1
    assert sums.exact({"answer": "7"}, "17") == 0
    for name in ("calculator", "sorting"):
        module = recipe(name)
        held = random.Random("held out")
        asked = {json.dumps(module.item(held)) for _ in range(64)}
        seed = random.randrange(1 << 30)
        print(f"{seed = }")
        chance = random.Random(seed)
        same = [json.dumps(module.item(chance)) in asked for _ in range(1000)]
        assert sum(same) < 20, name


def test_the_calculator(recipe: Any) -> None:
    calculator = recipe("calculator")
    assert calculator.calculate("CALC 12 * 31") == "372"
    assert calculator.calculate(" CALC 100 - 7\n") == "93"
    for text in ("12 * 31", "CALC 12 / 3", "CALC 1 + 2 + 3", "CALC " + "9" * 7 + " * 2", ""):
        assert calculator.calculate(text) == "error"


@pytest.mark.parametrize("name", ["calculator", "sorting"])
def test_a_step(recipe: Any, name: str) -> None:
    # A random model is never right, so its groups have no signal.
    recipe(name, *STEP, "--model", "tiny").main()
    first, last = log_of(f"runs/{name}")
    assert (first["step"], last["step"], last["staleness"]) == ("0", "1", "0")
    assert float(last["update_ms"]) > 0
    assert len(Path(f"runs/{name}/heldout.jsonl").read_text().splitlines()) == 2


def test_distillation(recipe: Any) -> None:
    """The student is the teacher without layers, and learns the teacher's probabilities."""
    teacher = sglrl.local_model("tiny")
    program = recipe(
        "distill", *STEP, "--teacher", teacher, "--layers", "1", "--steps", "6", "--lr", "1e-3"
    )
    program.main()
    losses = [float(row["loss"]) for row in log_of("runs/distill")[1:]]
    assert losses[-1] < losses[0] * 0.7
    student = AutoModelForCausalLM.from_pretrained("runs/distill/student")
    assert len(student.model.layers) == 1
    whole = AutoModelForCausalLM.from_pretrained(teacher)
    kept = whole.model.layers[0].mlp.down_proj.weight
    assert torch.equal(student.model.layers[0].mlp.down_proj.weight, kept)


def torchrun(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program in two ranks."""
    done = subprocess.run(
        [*TORCHRUN, *arguments], capture_output=True, text=True, timeout=600, env=ENVIRONMENT
    )
    assert done.returncode == 0, done.stderr
    return done


def test_a_sharded_step_is_that_of_one_policy(tmp_path: Path) -> None:
    seed = random.randrange(1 << 30)
    print(f"{seed = }")
    program = str(Path(__file__).with_name("fsdp_program.py"))
    done = torchrun(program, str(RECIPES), sglrl.local_model("tiny"), str(tmp_path), str(seed))
    sharded, whole = json.loads(done.stdout.splitlines()[-1])
    assert sharded == pytest.approx(whole, rel=1e-4)
    assert whole > 0
    one, other = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32).state_dict()
        for name in ("sharded", "whole")
    )
    before = AutoModelForCausalLM.from_pretrained(sglrl.local_model("tiny")).state_dict()
    for name, tensor in other.items():
        # Adam's first step is about the learning rate, 0.01, for every weight.
        torch.testing.assert_close(one[name], tensor, atol=2e-3, rtol=1e-2)
    assert any((other[name] - before[name]).abs().max() > 5e-3 for name in other)


def test_recipe_5(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torchrun(str(RECIPES / "fsdp.py"), *STEP, "--model", "tiny")
    assert [row["step"] for row in log_of("runs/fsdp")] == ["0", "1"]
    assert Path("runs/fsdp/model/model.safetensors").exists()


def test_the_plot(recipe: Any, tmp_path: Path) -> None:
    log = recipe("log")
    for seed in range(2):
        folder = tmp_path / f"run-{seed}"
        folder.mkdir()
        (folder / "log.csv").write_text("step,seconds,heldout\n0,30,0.1\n1,31,\n2,32,0.5\n")
    log.plot([tmp_path / "run-0", tmp_path / "run-1"], tmp_path / "made.png", "sums")
    assert (tmp_path / "made.png").read_bytes().startswith(b"\x89PNG")
