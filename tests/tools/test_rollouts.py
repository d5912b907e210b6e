"""``sglrl rollouts``: the summary of saved trajectories, as tables and as JSON."""

from __future__ import annotations

import json
import math
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sglrl
from sglrl.__main__ import main
from sglrl.launching.tiny_model import make_tokenizer
from sglrl.rollouts import save
from sglrl.sessions import trajectory_files
from sglrl.tools import rollout_summary
from sglrl.tools.rollout_summary import summarize, table_of


def make(
    reward: float, item: int | None = 0, sizes: Sequence[int] = (2,), **changes: Any
) -> sglrl.Trajectory:
    """Return a trajectory with turns of these sizes, and one observed token after each turn.

    The last turn gets the reward. Each turn takes 2 s, and 1 s passes before each later turn.
    """
    turns = []
    mask: list[bool] = []
    for number, size in enumerate(sizes):
        last = number == len(sizes) - 1
        turns.append(
            sglrl.Turn(
                start=len(mask),
                stop=len(mask) + size,
                reward=reward if last else 0.0,
                seconds=2.0,
                seconds_before=float(number > 0),
                **(changes.pop("turn", {}) if last else {}),
            )
        )
        mask += [True] * size + [False]
    values: dict[str, Any] = {
        "prompt_ids": [1, 2],
        "response_ids": [10 + i for i in range(len(mask))],
        "loss_mask": mask,
        "logprobs": [-0.5 * kept for kept in mask],
        "versions": [3 if kept else -1 for kept in mask],
        "turns": turns,
        "metadata": {} if item is None else {"item": item, "sample": 0},
    }
    return sglrl.Trajectory(**{**values, **changes})


def run(*arguments: Any, capsys: pytest.CaptureFixture[str], code: int = 0) -> str:
    """Run the command in this process. Return its output, or its error if it must fail."""
    with pytest.raises(SystemExit) as exit_:
        main(["rollouts", *map(str, arguments)])
    captured = capsys.readouterr()
    assert exit_.value.code == code, captured.err
    return captured.err if code else captured.out


def test_the_summary_counts_every_trajectory_of_all_files(tmp_path: Path) -> None:
    save(tmp_path / "a", [make(0, 0), make(4, 0, (1, 3)), make(1, 1), make(1, 1)])
    save(tmp_path / "b", [make(9, 1, turn={"finish_reason": "length"})])
    s = summarize([tmp_path / "a", tmp_path / "b"])
    assert (s.files, s.trajectories, s.conversations, s.sampled_tokens) == (2, 5, 5, 12)
    # Item 1 of another file is another group.
    assert s.groups == 3
    assert s.group_reward_std == pytest.approx((2 + 0 + 0) / 3)
    assert (s.reward_mean, s.reward_min, s.reward_max) == (3, 0, 9)
    assert s.reward_std == pytest.approx(np.std([0, 4, 1, 1, 9]))
    assert s.finish_reasons == {"stop": 4, "length": 1}
    assert s.truncated == 0.2
    assert (s.turns.mean, s.turns.p50, s.turns.max) == (1.2, 1, 2)
    lengths = [3, 6, 3, 3, 3]
    assert s.response_tokens.mean == pytest.approx(np.mean(lengths))
    assert s.response_tokens.p90 == pytest.approx(np.percentile(lengths, 90))
    assert s.response_tokens.max == 6
    assert (s.engine_seconds.mean, s.engine_seconds.max) == (2.4, 4)
    assert (s.tool_seconds.mean, s.tool_seconds.max) == (0.2, 1)
    assert s.tool_share == pytest.approx(1 / 13)
    assert s.named_rewards == {}


def test_named_rewards(tmp_path: Path) -> None:
    form, length = sglrl.Reward("form", 1.0, 0.5), sglrl.Reward("length", -2.0, 0.25)
    given = [
        make(0.5, turn={"rewards": (form,)}),
        make(0.0, turn={"rewards": (form, length)}),
        make(1.5),
    ]
    save(tmp_path / "a", given)
    named = summarize([tmp_path / "a"]).named_rewards
    assert list(named) == ["form", "length"]
    assert named["form"].trajectories == pytest.approx(2 / 3)
    assert named["form"].mean == 1
    assert named["form"].weighted == pytest.approx(1 / 3)
    assert named["form"].share == pytest.approx(0.5)
    assert named["length"].mean == -2
    assert named["length"].share == pytest.approx(-0.25)


def test_policy_versions_of_the_model_and_of_adapters(tmp_path: Path) -> None:
    mixed = make(1, sizes=(2, 1), versions=[3, 4, -1, 6, -1])
    adapter = make(1, turn={"lora": "x"}, lora_versions=[7, 8, -1])
    save(tmp_path / "a", [make(1), mixed, adapter])
    versions = summarize([tmp_path / "a"]).versions
    assert list(versions) == ["", "x"]
    assert (versions[""].oldest, versions[""].newest, versions[""].mixed) == (3, 6, 1)
    assert (versions["x"].oldest, versions["x"].newest, versions["x"].mixed) == (7, 8, 1)


def test_branches_are_conversations(tmp_path: Path) -> None:
    branch = make(2, sizes=(4,), versions=[5, 5, 5, 5, -1], turn={"finish_reason": "length"})
    save(tmp_path / "a", [make(1, branches=(branch,))])
    s = summarize([tmp_path / "a"])
    assert (s.trajectories, s.conversations, s.reward_mean) == (1, 2, 3)
    assert (s.sampled_tokens, s.turns.mean, s.engine_seconds.mean) == (6, 2, 4)
    assert s.response_tokens.mean == 4
    assert s.truncated == 0.5
    assert s.versions[""].mixed == 1


def test_groups_are_unknown_without_items(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path / "a", [make(1, 0), make(2, None)])
    s = summarize([tmp_path / "a"])
    assert s.groups is None
    assert math.isnan(s.group_reward_std)
    assert "unknown: trajectories have no metadata 'item'" in run(tmp_path / "a", capsys=capsys)


@pytest.mark.parametrize(
    ("wanted", "ranks"), [(0, []), (1, [1]), (2, [1, 5]), (3, [1, 3, 5]), (9, [1, 2, 3, 4, 5])]
)
def test_samples_go_from_the_best_to_the_worst(
    tmp_path: Path, wanted: int, ranks: list[int]
) -> None:
    save(tmp_path / "a", [make(reward, item=reward) for reward in (3, 1, 5)])
    save(tmp_path / "b", [make(reward, item=reward) for reward in (2, 4)])
    samples = summarize([tmp_path / "a", tmp_path / "b"], wanted).samples
    assert [sample.rank for sample in samples] == ranks
    places = {1: ("a", 2), 2: ("b", 1), 3: ("a", 0), 4: ("b", 0), 5: ("a", 1)}
    for sample in samples:
        assert sample.reward == sample.item == 6 - sample.rank
        assert (Path(sample.file).name, sample.index) == places[sample.rank]
        assert (sample.prompt, sample.response) == ("1 2", "10 11 12")


def test_the_tokenizer_decodes_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = make_tokenizer(tmp_path / "model", 512)
    prompt, answer = (
        tokenizer.encode("What is [red]1[/red]?"),
        tokenizer.encode("\x1b[31mTwo. " * 99),
    )
    save(
        tmp_path / "a",
        [
            make(
                1,
                prompt_ids=prompt,
                response_ids=answer,
                loss_mask=[True] * len(answer),
                logprobs=[-1.0] * len(answer),
                versions=[0] * len(answer),
                turns=[sglrl.Turn(start=0, stop=len(answer))],
            )
        ],
    )
    out = run(tmp_path / "a", "--tokenizer", tmp_path / "model", capsys=capsys)
    assert "prompt: What is [red]1[/red]?" in out
    assert "\\x1b[31mTwo." in out
    assert "\x1b" not in out
    out = run(tmp_path / "a", "--tokenizer", tmp_path / "model", "--json", capsys=capsys)
    (sample,) = json.loads(out)["samples"]
    assert sample["prompt"] == "What is [red]1[/red]?"
    assert sample["response"].startswith("\x1b[31mTwo. \x1b[31mTwo.")
    assert " ... " in sample["response"]
    assert len(sample["response"]) <= 600


def test_json_has_what_the_tables_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = [make(0, 0), make(4, 0, (1, 3), turn={"rewards": (sglrl.Reward("[b]form", 4.0),)})]
    save(tmp_path / "a", given)
    found = json.loads(run(tmp_path / "a", "--json", capsys=capsys))
    assert found["trajectories"] == 2
    assert found["groups"] == 1
    assert found["response_tokens"]["max"] == 6
    assert found["named_rewards"]["[b]form"]["share"] == 1
    assert found["versions"] == {"": {"oldest": 3, "newest": 3, "mixed": 0}}
    assert [sample["rank"] for sample in found["samples"]] == [1, 2]
    out = run(tmp_path / "a", capsys=capsys)
    rows = [line.strip("│ ").split("│") for line in out.splitlines() if line.startswith("│")]
    cells = {row[0].strip(): [cell.strip() for cell in row[1:]] for row in rows}
    assert cells["trajectories"] == ["2"]
    assert cells["groups"] == ["1, reward std within a group 2"]
    assert cells["reward"] == ["mean 2, std 2, min 0, max 4"]
    assert cells["finish reasons"] == ["stop 2"]
    assert cells["truncated"] == ["0.0%"]
    assert cells["policy versions"] == ["3 to 3, 0 trajectories mix versions"]
    assert cells["time between turns"] == ["14.3%, the rest in the engine"]
    assert cells["response tokens"] == ["4", "4", "6", "6"]
    assert cells["turns"] == ["1.5", "1.5", "1.9", "2.0"]
    assert cells["[b]form"] == ["50.0%", "4", "2", "100.0%"]
    assert cells["best, 1 of 2"][0].startswith("prompt: 1 2")
    assert "worst, 2 of 2" in cells


def test_nothing_in_the_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path / "a", [])
    out = run(tmp_path / "a", tmp_path / "a", capsys=capsys)
    assert out == "no trajectories: nothing was saved in the given files\n"
    found = json.loads(run(tmp_path / "a", "--json", capsys=capsys))
    assert found["trajectories"] == found["groups"] == 0
    assert found["reward_mean"] is found["truncated"] is found["turns"]["p50"] is None
    assert found["samples"] == []


def test_a_trajectory_without_turns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path / "a", [make(0, sizes=())])
    assert "no turns 1" in run(tmp_path / "a", capsys=capsys)


@pytest.mark.parametrize(
    ("name", "code", "says"),
    [
        ("missing", 1, "No such file or directory"),
        ("folder", 1, "Is a directory"),
        ("zero", 2, "zero is not a file of trajectories: it is empty; sglrl.rollouts.save writes"),
        ("text", 2, "text is not a file of trajectories: its first bytes are wrong"),
        ("cut", 2, "cut is cut short: trajectory 1 of 2 is missing or incomplete"),
        ("changed", 2, "changed is damaged: trajectory 1 of 2 is not what was written"),
    ],
)
def test_a_wrong_file_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, code: int, says: str
) -> None:
    save(tmp_path / "good", [make(1), make(2)])
    data = (tmp_path / "good").read_bytes()
    (tmp_path / "folder").mkdir()
    (tmp_path / "zero").write_bytes(b"")
    (tmp_path / "text").write_text('{"prompt_ids": [1]}\n')
    (tmp_path / "cut").write_bytes(data[:-1])
    (tmp_path / "changed").write_bytes(data[:-1] + b"\xff")
    message = run(tmp_path / "good", tmp_path / name, capsys=capsys, code=code)
    assert message.startswith("error: ")
    assert says in message
    assert message.count("\n") == 1


def test_the_files_are_streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No trajectory is kept. The second reading, for the samples, ends with the last of them."""
    save(tmp_path / "a", [make(reward) for reward in (1, 3, 2, 2, 2)])
    save(tmp_path / "b", [make(2)])
    read: list[str] = []
    alive: weakref.WeakSet[sglrl.Trajectory] = weakref.WeakSet()

    def counted(path: Path) -> Iterator[sglrl.Trajectory]:
        for trajectory in trajectory_files.iter_load(path):
            read.append(path.name)
            alive.add(trajectory)
            # Also the previous one, and the last one of the first reading.
            assert len(alive) <= 3
            yield trajectory

    monkeypatch.setattr(rollout_summary, "iter_load", counted)
    table_of(summarize([tmp_path / "a", tmp_path / "b"], 1))
    assert read == ["a"] * 5 + ["b"] + ["a"] * 2
