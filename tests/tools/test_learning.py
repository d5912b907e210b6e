"""The demo's parts: tasks, the learning goal, the replay that detects errors; and a short run."""

from __future__ import annotations

import io
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from rich.console import Console

import sglrl
from sglrl.__main__ import main
from sglrl.inference.completion import Completion
from sglrl.inference.renderer import Renderer, find_renderer
from sglrl.inference.tokens import TokenizerBox
from sglrl.launching.tiny_model import CHARACTER_SPECIAL_TOKENS, make_model
from sglrl.rollouts import Trajectory, Turn, load
from sglrl.sessions.tools import run_tools
from sglrl.tools.demo.replay import replay
from sglrl.tools.demo.report import (
    GOAL,
    WINDOW,
    Comparison,
    Report,
    Step,
    judge,
    mean_rewards,
    save_plot,
    table_of,
    task_result,
)
from sglrl.tools.demo.tasks import (
    CHARACTERS,
    NAMES,
    RENDERER,
    TASKS,
    Agent,
    items,
    session_arguments,
    share,
)
from sglrl.tools.logprob_check import LogprobCheck


def test_items_repeat_by_seed_and_tasks_take_turns() -> None:
    first = list(islice(items(TASKS, 3), 20))
    assert first == list(islice(items(TASKS, 3), 20)) != list(islice(items(TASKS, 4), 20))
    assert [item["task"] for item in first] == ["repeat", "lookup"] * 10
    assert len({item["shelf"] for item in first}) == 20
    texts = [item["messages"][0]["content"] for item in first]
    assert {len(text) for text in texts} == {1, 4}
    assert set("".join(texts)) <= set(CHARACTERS)


def test_share_counts_places() -> None:
    assert [share(text, "0123") for text in ("0123", "0", "", "1230", "9923", "01234")] == [
        1, 0.25, 0, 0, 0.5, 1,
    ]  # fmt: skip


def test_a_new_policy_has_one_token_a_character_and_no_favourite(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = make_model(tmp_path / "m", characters=CHARACTERS, initializer_range=0.02)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == len(CHARACTERS) + len(CHARACTER_SPECIAL_TOKENS)
    ids = tokenizer.encode("07ba", add_special_tokens=False)
    assert len(ids) == 4
    assert tokenizer.decode(ids) == "07ba"
    messages = [{"role": "user", "content": "12"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|user|>12<|end|><|assistant|>"
    assert len(tokenizer.encode(text, add_special_tokens=False)) == 5
    model = AutoModelForCausalLM.from_pretrained(folder)
    logits = model(torch.tensor([ids])).logits[0]
    chances = torch.softmax(logits, -1)
    assert chances.max() < 2 / len(tokenizer)


# --- the tool -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> TokenizerBox:
    folder = tmp_path_factory.mktemp("characters") / "m"
    return TokenizerBox(str(make_model(folder, characters=CHARACTERS)))


@pytest.fixture(scope="module")
def letters(box: TokenizerBox) -> Renderer:
    found = find_renderer(RENDERER, box, {})
    assert found is not None
    return found


async def test_only_the_lookup_has_a_tool(box: TokenizerBox) -> None:
    answers = box.encode_rendered(["c"]) * 2
    found = []
    async with sglrl.launch(box.model, engine="fake", answers=answers) as client:
        for item in islice(items(TASKS, 0), 2):
            async with client.session(**session_arguments(item)) as session:
                turn = await session.generate(max_new_tokens=2)
            found.append([call.name for call in turn.tool_calls])
    assert found == [[], ["look_up"]]


def test_a_turn_of_one_letter_is_a_call(box: TokenizerBox, letters: Renderer) -> None:
    def parsed(text: str) -> tuple[str, list[Any]]:
        said = letters.parse([], box.encode_rendered([text])[0], 0)
        return said.content, [(call.name, call.arguments) for call in said.tool_calls]

    assert parsed("c") == ("", [("look_up", {"name": "c"})])
    for text in ("7", "42", "cc", "4c", ""):
        assert parsed(text) == (text, [])
    # With other tokens it is none: the template would not write the same tokens for the call.
    assert parsed("<|end|>c") == ("c", [])
    call = {"function": {"name": "look_up", "arguments": {"name": "c"}}}
    messages = [
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "42"},
    ]
    assert (
        box.render(messages, {})
        == "<|user|>c<|end|><|assistant|>c<|end|><|tool|>42<|end|><|assistant|>"
    )


class ScriptedSession:
    """A session whose policy says the given texts."""

    room = 100

    def __init__(self, box: TokenizerBox, letters: Renderer, *texts: str) -> None:
        self.metadata: dict[str, Any] = {}
        self.observed: list[Any] = []
        self.total = 0.0
        self._box, self._letters, self._texts = box, letters, list(texts)

    async def generate(self, **values: Any) -> Any:
        text = self._texts.pop(0)
        said = self._letters.parse([], self._box.encode_rendered([text])[0], 0)
        return SimpleNamespace(text=said.content, tool_calls=said.tool_calls)

    async def run_tools(self, tools: Any, **values: Any) -> Completion:
        return await run_tools(self, tools, timeout=5, max_result=100, **values)

    def observe(self, what: Any) -> None:
        self.observed += [message["content"] for message in what]

    def reward(self, value: float) -> None:
        self.total += value


class InstantShelf:
    async def look_up(self, shelf: int, name: str) -> str:
        return f"{shelf}{NAMES.index(name)}"


@pytest.mark.parametrize(
    ("texts", "reward", "observed"),
    [
        (["c", "42"], 1.0, ["42"]),
        (["c", "47"], 0.75, ["42"]),
        (["c", "c"], 0.5, ["42"]),
        (["d"], 0.0, []),
        (["42"], 0.0, []),
    ],
)
async def test_the_reward_of_a_lookup(
    box: TokenizerBox, letters: Renderer, texts: list[str], reward: float, observed: list[str]
) -> None:
    session = ScriptedSession(box, letters, *texts)
    agent = Agent(InstantShelf(), [])  # type: ignore[arg-type]
    item = {"task": "lookup", "messages": [{"role": "user", "content": "c"}], "shelf": 4}
    returned = await agent(session, item)  # type: ignore[arg-type]
    assert session.total + returned == reward
    assert session.observed == observed
    assert ("tool_errors" in session.metadata) == (texts == ["d"])


# --- the learning goal ----------------------------------------------------------------------------


def step(number: int, **rewards: float) -> Step:
    return Step(
        version=number,
        rewards=rewards,
        staleness=1.0,
        tokens=100,
        entropy=1.0,
        clipped=0.1,
        train_seconds=0.2,
        update_seconds=0.02,
        seconds=30.0 + number,
    )


def report(steps: list[Step], **changes: Any) -> Report:
    values: dict[str, Any] = {
        "sglrl_version": "0",
        "sglang_version": "0",
        "seed": 0,
        "replicas": 1,
        "group_size": 16,
        "batch_size": 32,
        "max_staleness": 1,
        "goal_within": 240.0,
        "start_seconds": 25.0,
        "learn_seconds": 20.0,
        "seconds": 60.0,
        "steps": steps,
        "tasks": [task_result(steps, task) for task in TASKS],
        "comparison": Comparison(steps=3, asynchronous=1.0, synchronous=1.5),
        "logprobs": LogprobCheck(
            tokens=10, largest_difference=1e-6, mean_difference=1e-7, tolerance=1e-4, worst="here"
        ),
        **changes,
    }
    return judge(Report(**values))


LEARNT = [step(i, repeat=min(1.0, i / 8), lookup=min(1.0, i / 16)) for i in range(25)]


def test_the_goal_is_a_mean_over_steps() -> None:
    lucky = [step(i, repeat=1.0 if i == 3 else 0.1) for i in range(10)]
    assert task_result(lucky, "repeat").goal_step is None
    assert mean_rewards(lucky, "repeat")[3] == pytest.approx(1.3 / 4)
    result = task_result(LEARNT, "repeat")
    assert result.first == 0.25
    assert result.last == 1.0
    # The window's mean of 5/8, 6/8, 7/8, 1 and 1 reaches the goal. One step earlier it is 3/4.
    assert result.goal_step == 10
    assert result.goal_seconds == 39.0
    # The first steps alone do not fill a window. A batch may have no sample of a task.
    assert task_result([step(0, repeat=1.0)] * (WINDOW - 1), "repeat").goal_step is None
    assert mean_rewards([step(0, repeat=0.5), step(1, lookup=1.0)], "repeat") == [0.5, 0.5]


def test_what_is_learnt_in_time_with_right_logprobs_passes() -> None:
    assert report(LEARNT).failures == []
    late = report(LEARNT, goal_within=42.0)
    assert late.failures == ["lookup: learnt after 45 s, later than 42 s"]
    unlearnt = report(LEARNT[:15])
    assert [line.partition(":")[0] for line in unlearnt.failures] == ["lookup"]
    forgotten = [*LEARNT, *(step(25 + i, repeat=0.2, lookup=1.0) for i in range(WINDOW))]
    assert report(forgotten).failures == [f"repeat: the reward ended at 0.20, not at {GOAL}"]
    slow = report(LEARNT, comparison=Comparison(steps=3, asynchronous=1.0, synchronous=0.9))
    assert "no longer than running ahead" in slow.failures[0]
    wrong = msgspec.structs.replace(report(LEARNT).logprobs, largest_difference=1.0)
    assert report(LEARNT, logprobs=wrong).failures == ["logprobs are not the model's: here"]
    nothing = msgspec.structs.replace(wrong, tokens=0, largest_difference=0.0)
    assert len(report(LEARNT, logprobs=nothing).failures) == 1


def test_table_and_plot(tmp_path: Path) -> None:
    def text(made: Report) -> str:
        console = Console(file=io.StringIO(), width=200)
        console.print(table_of(made))
        return str(console.file.getvalue())  # type: ignore[attr-defined]

    assert "1.50 times as long" in text(report(LEARNT))
    assert "FAILED: lookup" in text(report(LEARNT[:15], comparison=None))
    file = tmp_path / "folder" / "reward.png"
    save_plot(report(LEARNT), file)
    assert file.read_bytes().startswith(b"\x89PNG")


# --- replay ---------------------------------------------------------------------------------------


class LastToken(torch.nn.Module):
    """A model whose logits depend only on the last token."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(seed)
        self.table = torch.nn.Parameter(torch.randn((7, 7), generator=random))
        self.cached: list[list[int]] = []
        """The tokens that were computed on top of a KV cache."""

    def forward(self, input_ids: torch.Tensor, **options: Any) -> Any:
        if options["use_cache"]:
            self.cached += input_ids.tolist()
        return SimpleNamespace(logits=self.table[input_ids])


def test_replay_takes_each_tokens_own_version() -> None:
    versions = {v: LastToken(v).state_dict() for v in (4, 5)}
    prompt, response = [1, 2], [3, 4, 5, 6, 0]
    mask, made_by = [True, True, False, True, True], [4, 5, -1, 5, 5]
    logprobs = np.zeros(5, np.float32)
    for i, version in enumerate(made_by):
        if version >= 0:
            before = ([*prompt, *response])[i + 1]
            rows = torch.log_softmax(versions[version]["table"], -1)
            logprobs[i] = rows[before, response[i]]
    good = Trajectory(
        prompt_ids=np.array(prompt),
        response_ids=np.array(response),
        loss_mask=np.array(mask),
        logprobs=logprobs,
        versions=np.array(made_by),
        turns=(Turn(start=0, stop=2), Turn(start=3, stop=5)),
    )
    model = LastToken(0)
    found = replay(model, versions, [good, good], 1e-5)
    assert found.tokens == 8
    assert found.passed
    # The first turn has two versions. The step of its first token also computes the prompt.
    assert model.cached == [[1, 2], [3]] * 2
    for position in (0, 1, 3):
        wrong = logprobs.copy()
        wrong[position] += 0.01
        found = replay(LastToken(0), versions, [good, good.replace(logprobs=wrong)], 1e-5)
        assert not found.passed
        assert found.largest_difference == pytest.approx(0.01, abs=1e-4)
        assert f"trajectory 1, response token {position}, version {made_by[position]}" in (
            found.worst
        )
    swapped = good.replace(versions=np.array([5, 5, -1, 5, 5]))
    assert not replay(LastToken(0), versions, [swapped], 1e-5).passed
    assert replay(LastToken(0), versions, [], 1e-5).tokens == 0


# --- a run ----------------------------------------------------------------------------------------


@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("default")
def test_a_short_run_is_exact_and_reports_that_it_did_not_learn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The demo runs in this process, whose fork server imports SGLang once for all these tests."""
    file, plot = tmp_path / "demo.json", tmp_path / "reward.png"
    saved = tmp_path / "demo.traj"
    files = ["--json", str(file), "--plot", str(plot), "--trajectories", str(saved)]
    with pytest.raises(SystemExit) as exit_:
        main(["demo", "--steps", "4", "--no-compare", *files])
    assert exit_.value.code == 1
    # 4 steps of 32 groups of 16 samples.
    assert len(load(saved)) == 4 * 32 * 16
    made = msgspec.json.decode(file.read_bytes(), type=Report)
    assert [line.partition(":")[0] for line in made.failures] == ["repeat", "lookup"]
    assert made.logprobs.passed
    assert made.logprobs.tokens > 0
    assert [s.version for s in made.steps] == [0, 1, 2, 3]
    assert all(0 <= s.staleness <= 1 for s in made.steps)
    # At the start, all tokens are almost equally likely.
    assert made.steps[0].entropy == pytest.approx(np.log(21), abs=0.1)
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "FAILED: repeat" in capsys.readouterr().out
