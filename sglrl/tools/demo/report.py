"""The results of the demo: a struct (``--json`` writes it unchanged), a table and a plot."""

from __future__ import annotations

from pathlib import Path

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..logprob_check import LogprobCheck

WINDOW = 5
"""Number of steps over which rewards are averaged, so that one lucky batch is not a success."""
GOAL = 0.8
"""Mean reward that every task must reach. The maximum reward is 1."""


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One training step on a batch, with the weight update after it.

    Attributes:
        version: policy version when the batch was taken.
        rewards: mean reward by task. A task may be missing from a batch.
        staleness: age of a group's oldest token in versions, averaged over the groups.
        tokens: number of tokens that the policy sampled.
        entropy: mean entropy of the policy, in nats per sampled token.
        clipped: share of the tokens whose policy ratio was clipped.
        train_seconds: duration of the training step.
        update_seconds: duration of the weight update to the engines.
        seconds: time from the start of the command to the end of the step.
    """

    version: int
    rewards: dict[str, float]
    staleness: float
    tokens: int
    entropy: float
    clipped: float
    train_seconds: float
    update_seconds: float
    seconds: float


class TaskResult(msgspec.Struct, frozen=True, kw_only=True):
    """The learning result of one task.

    Attributes:
        first: mean reward over the first ``WINDOW`` steps.
        last: mean reward over the last ``WINDOW`` steps.
        goal_step: the first step at which the mean reward over the last ``WINDOW`` steps, this
            one included, reached the goal. None if the task never reached the goal.
        goal_seconds: seconds from the start of the command to the end of ``goal_step``, or None.
    """

    task: str
    first: float
    last: float
    goal_step: int | None
    goal_seconds: float | None


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """The duration of a step with and without rollouts that run ahead of the trainer.

    The first step of a run does not count, because no rollout can run ahead of it.

    Attributes:
        steps: number of measured steps of each kind.
        asynchronous: median of the seconds per step with rollouts that run ahead.
        synchronous: median of the seconds per step when the trainer waits for every batch.
    """

    steps: int
    asynchronous: float
    synchronous: float

    @property
    def ratio(self) -> float:
        return self.synchronous / self.asynchronous


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The results of one run. Times are in seconds.

    Attributes:
        goal_within: time limit for the goal, from the start of the command.
        failures: the requirements that the run did not meet. ``judge`` sets them.
    """

    sglrl_version: str
    sglang_version: str
    seed: int
    replicas: int
    group_size: int
    batch_size: int
    max_staleness: int
    goal_within: float
    start_seconds: float
    learn_seconds: float
    seconds: float
    steps: list[Step]
    tasks: list[TaskResult]
    comparison: Comparison | None
    logprobs: LogprobCheck
    failures: list[str] = []


def judge(report: Report) -> Report:
    """Return the report with every unmet requirement in ``failures``."""
    wrong = []
    for task in report.tasks:
        if task.goal_seconds is None or task.last < GOAL:
            wrong.append(f"{task.task}: the reward ended at {task.last:.2f}, not at {GOAL}")
        elif task.goal_seconds > report.goal_within:
            wrong.append(
                f"{task.task}: learnt after {task.goal_seconds:.0f} s, later than "
                f"{report.goal_within:g} s"
            )
    if report.comparison is not None and report.comparison.ratio <= 1:
        wrong.append("waiting for every batch took no longer than running ahead")
    if not report.logprobs.tokens or not report.logprobs.passed:
        wrong.append(f"logprobs are not the model's: {report.logprobs.worst}")
    return msgspec.structs.replace(report, failures=wrong)


def mean_rewards(steps: list[Step], task: str) -> list[float]:
    """Return for each step the mean reward over the last ``WINDOW`` steps, this one included.

    Steps without this task do not count. If no step counts, the mean is 0.
    """
    means = []
    for end in range(1, len(steps) + 1):
        recent = [s.rewards[task] for s in steps[max(0, end - WINDOW) : end] if task in s.rewards]
        means.append(sum(recent) / len(recent) if recent else 0.0)
    return means


def task_result(steps: list[Step], task: str) -> TaskResult:
    means = mean_rewards(steps, task)
    goal = next((i for i, m in enumerate(means) if i + 1 >= WINDOW and m >= GOAL), None)
    return TaskResult(
        task=task,
        first=means[min(WINDOW, len(means)) - 1],
        last=means[-1],
        goal_step=None if goal is None else goal + 1,
        goal_seconds=None if goal is None else steps[goal].seconds,
    )


def table_of(report: Report) -> RenderableType:
    """Return the report as a table for a terminal or a log."""
    r = report
    learnt = Table(title="sglrl demo", title_justify="left", min_width=60)
    learnt.add_column("task", style="bold")
    for column in ("reward at first", "at last", "goal", "after"):
        learnt.add_column(column, justify="right")
    for task in r.tasks:
        learnt.add_row(
            task.task,
            f"{task.first:.2f}",
            f"{task.last:.2f}",
            f"{GOAL}",
            "never"
            if task.goal_seconds is None
            else f"{task.goal_step} steps, {task.goal_seconds:.0f} s",
        )
    facts = Table(show_header=False, min_width=60)
    facts.add_column("what", style="bold")
    facts.add_column("value")
    count = len(r.steps)
    tokens = sum(s.tokens for s in r.steps)
    compared = r.comparison
    rows = [
        (
            "steps",
            f"{count} of {r.batch_size} x {r.group_size} samples in {r.learn_seconds:.0f} s "
            f"({r.learn_seconds / count:.2f} s each), workers up in {r.start_seconds:.0f} s",
        ),
        ("tokens", f"{tokens:,} sampled, {tokens / r.learn_seconds:,.0f} a second"),
        (
            "trainer",
            f"{sum(s.train_seconds for s in r.steps) / count:.2f} s a step; new weights in "
            f"{sum(s.update_seconds for s in r.steps) / count * 1000:.0f} ms",
        ),
        (
            "staleness",
            f"{sum(s.staleness for s in r.steps) / count:.2f} versions, at most {r.max_staleness}",
        ),
        (
            "logprobs",
            f"{r.logprobs.tokens:,} replayed in transformers with the weights of their versions, "
            f"largest difference {r.logprobs.largest_difference:.2e} (tolerance "
            f"{r.logprobs.tolerance:.0e})",
        ),
    ]
    if compared is not None:
        rows.append(
            (
                "synchronous",
                f"{compared.synchronous:.2f} s a step, running ahead {compared.asynchronous:.2f} s "
                f"(medians of {compared.steps}): {compared.ratio:.2f} times as long",
            )
        )
    for name, value in rows:
        facts.add_row(name, value)
    if r.failures:
        verdict = Text("\n".join(f"FAILED: {line}" for line in r.failures), style="bold red")
    else:
        verdict = Text("passed: it has learnt, and every logprob is the model's", style="green")
    return Group(learnt, facts, verdict)


def save_plot(report: Report, file: Path) -> None:
    """Save a plot of every task's reward over the steps as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for number, result in enumerate(report.tasks):
        color = f"C{number}"
        points = [
            (i, s.rewards[result.task])
            for i, s in enumerate(report.steps, 1)
            if result.task in s.rewards
        ]
        axes.plot(*zip(*points, strict=True), color=color, alpha=0.3, linewidth=1)
        means = mean_rewards(report.steps, result.task)
        axes.plot(range(1, len(means) + 1), means, color=color, label=result.task)
    axes.axhline(GOAL, color="0.5", linestyle="--", linewidth=1)
    axes.set(
        xlabel=f"step ({report.learn_seconds / len(report.steps):.2f} s each)",
        ylabel=f"reward (mean over {WINDOW} steps)",
        ylim=(0, 1.02),
        xlim=(0, None),
        title=f"GRPO from random weights, at most {report.max_staleness} version(s) stale",
    )
    axes.legend(loc="lower right")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120, format="png")
