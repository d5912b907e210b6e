"""The check's parts one by one: it detects errors, the report counts, and the table agrees."""

from __future__ import annotations

import asyncio
import io
import math
from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from sglrl.inference.completion import Completion
from sglrl.inference.display import can_redraw
from sglrl.inference.sampling import SamplingParams
from sglrl.tools.check.report import Report, ideal_cached_tokens, make_report, table_of
from sglrl.tools.check.rollouts import Rollout, run_rollouts
from sglrl.tools.check.tasks import Task, make_tasks
from sglrl.tools.display import stage
from sglrl.tools.logprob_check import compare, reference_logprobs, tolerance_for
from sglrl.wire.engine import TokenChunk

VOCABULARY = 11


def completion(
    prompt: Sequence[int],
    output: Sequence[int],
    logprobs: Sequence[float] | None = None,
    *,
    worker: int = 0,
    cached: int = 0,
    seconds: float = 1.0,
) -> Completion:
    values = np.array([0.0] * len(output) if logprobs is None else logprobs, dtype="<f4")
    chunk = TokenChunk(
        np.array(output, dtype="<i4").tobytes(), values.tobytes(), "length", cached_tokens=cached
    )
    return Completion(
        worker,
        0,
        np.array(prompt, dtype="<i4").tobytes(),
        (chunk,),
        True,
        0,
        0.0,
        0.0,
        0.0,
        seconds,
        lambda ids, skip: "",
        SamplingParams(),
    )


class LastTokenModel:
    """A language model whose next-token logits depend only on the token before.

    Padding on the right, batching and order must not change the values that are read from the
    model.
    """

    def __init__(self) -> None:
        import torch

        torch.manual_seed(0)
        self.table = torch.randn(VOCABULARY, VOCABULARY)
        self.device = "cpu"

    def __call__(self, *, input_ids: Any, attention_mask: Any, use_cache: bool) -> Any:
        assert attention_mask.shape == input_ids.shape
        return SimpleNamespace(logits=self.table[input_ids])

    def logprobs(self, prompt: Sequence[int], output: Sequence[int]) -> list[float]:
        tokens = [prompt[-1], *output]
        rows = self.table.log_softmax(-1)
        return [float(rows[a, b]) for a, b in pairwise(tokens)]


@pytest.fixture(scope="module")
def model() -> LastTokenModel:
    return LastTokenModel()


TOKENS = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=20)


def correct(model: LastTokenModel, count: int = 9) -> list[Completion]:
    found = []
    for i in range(count):
        prompt = [(i * 7 + j) % VOCABULARY for j in range(1 + i)]
        output = [(i * 3 + j * j) % VOCABULARY for j in range(1 + (i * 5) % 4)]
        found.append(completion(prompt, output, model.logprobs(prompt, output)))
    return found


def test_reference_covers_every_completion_once(model: LastTokenModel) -> None:
    completions = correct(model)
    seen = dict(reference_logprobs(model, completions))
    assert sorted(seen) == list(range(len(completions)))
    for i, values in seen.items():
        ours = completions[i].logprobs
        assert ours is not None
        np.testing.assert_allclose(values, ours, atol=1e-6)


def test_correct_logprobs_pass(model: LastTokenModel) -> None:
    completions = correct(model)
    done: list[None] = []
    check = compare(model, completions, 1e-4, lambda: done.append(None))
    assert check.passed
    assert check.tokens == sum(len(c.output_ids) for c in completions)
    assert check.largest_difference < 1e-6
    assert len(done) == len(completions)


@pytest.mark.parametrize(
    ("error", "difference"), [(0.01, 0.01), (-0.01, 0.01), (math.nan, math.inf)]
)
def test_one_tampered_logprob_fails_and_is_named(
    model: LastTokenModel, error: float, difference: float
) -> None:
    completions = correct(model)
    victim = completions[5]
    values = np.array(victim.logprobs)
    values[1] += error
    completions[5] = completion(victim.prompt_ids, victim.output_ids, values)
    check = compare(model, completions, 1e-4)
    assert not check.passed
    assert check.largest_difference == pytest.approx(difference, rel=1e-3)
    assert "request 5, output token 1 " in check.worst


def test_a_missing_logprob_is_no_pass(model: LastTokenModel) -> None:
    with pytest.raises(ValueError, match="one logprob per output token"):
        compare(model, [completion([1], [2, 3], [0.0])], 1e-4)


def test_tolerances() -> None:
    assert tolerance_for("float32") == 1e-4
    assert tolerance_for("bfloat16") == tolerance_for("float16") == 3e-2


@given(st.lists(st.tuples(TOKENS, TOKENS), min_size=1, max_size=8))
def test_ideal_cache_is_the_longest_known_prefix(
    requests: list[tuple[list[int], list[int]]],
) -> None:
    def shared(a: Sequence[int], b: Sequence[int]) -> int:
        length = 0
        while length < min(len(a), len(b)) and a[length] == b[length]:
            length += 1
        return length

    expected, known = 0, [[]]
    for prompt, output in requests:
        expected += min(max(shared(prompt, k) for k in known), len(prompt) - 1)
        known.append([*prompt, *output])
    assert ideal_cached_tokens([completion(p, o) for p, o in requests]) == expected


def report_of(check_passes: bool, model: LastTokenModel) -> Report:
    good = correct(model, 4)
    turns = [
        completion(c.prompt_ids, c.output_ids, c.logprobs, worker=i % 2, seconds=0.1 * (i + 1))
        for i, c in enumerate(good)
    ]
    rollouts = [
        Rollout(Task("task-0", ("a", "b")), 0, turns[:2]),
        Rollout(Task("task-1", ("a",)), 0, turns[2:3]),
        Rollout(Task("task-1", ("a",)), 1, turns[3:]),
    ]
    return make_report(
        rollouts,
        compare(model, turns, 1e-4 if check_passes else -1.0),
        seconds=2.0,
        start_seconds=0.5,
        sglrl_version="1",
        sglang_version="2",
        model="m",
        architecture="Qwen3ForCausalLM",
        dtype="float32",
        device="cpu",
        replicas=2,
        in_flight=64,
        seed=0,
    )


def shown(report: Report) -> str:
    console = Console(file=io.StringIO(), width=140)
    console.print(table_of(report))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_report_counts(model: LastTokenModel) -> None:
    report = report_of(True, model)
    turns = correct(model, 4)
    assert (report.rollouts, report.multi_turn_rollouts, report.requests) == (3, 1, 4)
    assert report.prompt_tokens == sum(len(t.prompt_ids) for t in turns)
    assert report.generated_tokens == sum(len(t.output_ids) for t in turns)
    assert report.tokens_per_second == report.generated_tokens / 2.0
    assert report.latency_p50 == pytest.approx(0.25)
    assert report.latency_p99 == pytest.approx(0.397)
    assert [w.requests for w in report.workers] == [2, 2]
    assert sum(w.share for w in report.workers) == pytest.approx(1)
    assert sum(w.generated_tokens for w in report.workers) == report.generated_tokens


def test_json_is_the_report_and_the_table_shows_it(model: LastTokenModel) -> None:
    report = report_of(True, model)
    assert msgspec.json.decode(msgspec.json.encode(report), type=Report) == report
    table = shown(report)
    for value in (
        "3 (1 multi-turn), 64 in flight",
        f"{report.prompt_tokens} prompt, {report.generated_tokens} generated",
        "p50 250 ms, p99 397 ms",
        f"{report.cache_hit_rate:.1%} of prompt tokens",
        f"an ideal cache: {report.ideal_cache_hit_rate:.1%}",
        f"{report.logprobs.largest_difference:.2e}",
        f"{report.workers[1].share:.1%}",
        "passed",
    ):
        assert value in table


def test_a_failed_report_says_where(model: LastTokenModel) -> None:
    report = report_of(False, model)
    assert not report.passed
    assert "FAILED" in shown(report)
    assert report.logprobs.worst in shown(report)


def test_tasks_repeat_by_seed_and_some_have_follow_ups() -> None:
    assert make_tasks(64, 3) == make_tasks(64, 3)
    assert make_tasks(64, 3) != make_tasks(64, 4)
    turns = [len(task.questions) for task in make_tasks(64, 3)]
    assert (turns.count(1), turns.count(2), turns.count(3)) == (48, 8, 8)


class Recorder:
    """A client that answers on request, and counts the calls that it holds."""

    def __init__(self) -> None:
        self.running = 0
        self.most = 0
        self.seeds: list[int] = []
        self.cancelled = 0
        self.fail_at = -1

    async def generate(self, *, seed: int, **values: Any) -> Completion:
        self.running += 1
        self.most = max(self.most, self.running)
        self.seeds.append(seed)
        try:
            if len(self.seeds) == self.fail_at:
                raise LookupError("boom")
            for _ in range(3):
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
        return completion([1], [2])


async def recorded(client: Recorder, **overrides: Any) -> list[Rollout]:
    options: dict[str, Any] = {
        "samples": 4,
        "limit": 30,
        "in_flight": 5,
        "max_new_tokens": 1,
        "seed": 0,
        "on_done": lambda rollout: None,
    }
    return await run_rollouts(client, make_tasks(8, 0), **options | overrides)  # type: ignore[arg-type]


async def test_rollouts_keep_order_and_limit() -> None:
    client = Recorder()
    done: list[Rollout] = []
    rollouts = await recorded(client, on_done=done.append)
    assert client.most == 5
    assert [(r.task.name, r.sample) for r in rollouts] == [
        (f"task-{i // 4}", i % 4) for i in range(30)
    ]
    assert all(len(r.turns) == len(r.task.questions) for r in rollouts)
    assert len(done) == 30
    assert len(set(client.seeds)) == len(client.seeds) > 30


async def test_a_failing_rollout_cancels_the_others_and_is_raised() -> None:
    client = Recorder()
    client.fail_at = 7
    with pytest.raises(LookupError, match="boom"):
        await recorded(client)
    assert client.running == 0
    assert client.cancelled


def test_progress_without_a_terminal_is_a_few_plain_lines() -> None:
    console = Console(file=io.StringIO(), force_terminal=False, width=100)
    with stage(console, "rollouts", 100) as advance:
        for i in range(100):
            advance(f"{i + 1} tokens/s")
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert lines[0] == "rollouts: 100"
    assert lines[-1] == "rollouts: 100 of 100, 100 tokens/s"
    assert len(lines) == 9


@pytest.mark.parametrize(("width", "note"), [(100, "7 tokens/s, 3 of 5"), (30, "7 tok")])
def test_progress_on_a_terminal_is_one_line(
    monkeypatch: pytest.MonkeyPatch, width: int, note: str
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    console = Console(file=io.StringIO(), force_terminal=True, width=width)
    with stage(console, "rollouts", 3) as advance:
        advance("7 tokens/s, 3 of 5")
    assert isinstance(console.file, io.StringIO)
    assert "1/3" in console.file.getvalue()
    assert note in console.file.getvalue()
    assert ("3 of 5" in console.file.getvalue()) == (width == 100)


def test_progress_on_a_dumb_terminal_is_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    console = Console(file=io.StringIO(), force_terminal=True)
    with stage(console, "rollouts", 8) as advance:
        advance("7 tokens/s")
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().splitlines()[1] == "rollouts: 1 of 8, 7 tokens/s"


class Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_which_streams_can_redraw_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    assert can_redraw(Tty())
    assert not can_redraw(io.StringIO())
    assert not can_redraw(None)
    monkeypatch.setenv("TERM", "dumb")
    assert not can_redraw(Tty())
