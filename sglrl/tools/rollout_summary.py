"""The contents of files of trajectories: a struct (``--json`` prints it) and its tables."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..core.policy_versions import MODEL
from ..core.rollout_metrics import Distribution
from ..sessions.trajectory import Trajectory
from ..sessions.trajectory_files import iter_load

_WIDTH: Final = 60
_PROMPT: Final = 200
"""The maximum number of characters of a sample's prompt, or of its ids."""
_RESPONSE: Final = 600
"""The maximum number of characters of a sample's response, or of its ids."""


class NamedReward(msgspec.Struct, frozen=True, kw_only=True):
    """The rewards with one name.

    Attributes:
        trajectories: the share of the trajectories that have the reward, 0..1.
        mean: the mean of the unweighted reward, over the trajectories that have it.
        weighted: the part of the mean reward of all trajectories that comes from it.
        share: ``weighted`` divided by the mean reward. NaN if the mean reward is 0.
    """

    trajectories: float
    mean: float
    weighted: float
    share: float


class PolicyVersions(msgspec.Struct, frozen=True, kw_only=True):
    """The versions of one policy: the model, or an adapter.

    Attributes:
        oldest, newest: the range of the versions that sampled a token.
        mixed: the number of trajectories that several versions sampled.
    """

    oldest: int
    newest: int
    mixed: int


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One trajectory, with shortened texts.

    Attributes:
        rank: the position in the order of rewards. The best trajectory has 1.
        index: the position in the file.
        item, sample: these keys of the metadata, if they are numbers or texts.
        prompt, response: the text, or the token ids without a tokenizer.
    """

    rank: int
    reward: float
    file: str
    index: int
    item: int | str | None
    sample: int | str | None
    prompt: str
    response: str


class RolloutSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A summary of the trajectories in some files. Times are in seconds. NaN stands for no data.

    Attributes:
        groups: the number of groups. Trajectories of one file with the same ``metadata["item"]``
            are a group. None: some trajectories have no such number or text.
        group_reward_std: the mean of the standard deviations of the rewards within each group.
        named_rewards: by the names of the rewards.
        conversations: the number of conversations: all trajectories and their branches.
        sampled_tokens: the number of sampled tokens.
        response_tokens: the length of the response of a conversation, with observations.
        turns: the number of turns of a trajectory.
        engine_seconds: the sum of a trajectory's ``Turn.seconds``.
        tool_seconds: the sum of a trajectory's ``Turn.seconds_before``: the time between turns.
        tool_share: the share of ``tool_seconds`` in the sum of both times.
        finish_reasons: the number of conversations by finish reason. "": no turns.
        truncated: the share of the conversations whose last turn ended at its token limit.
        versions: by adapter name, where "" is the model.
        samples: trajectories at equal distances in the order of rewards, from the best to the
            worst.
    """

    files: int
    trajectories: int
    groups: int | None
    reward_mean: float
    reward_std: float
    reward_min: float
    reward_max: float
    group_reward_std: float
    named_rewards: dict[str, NamedReward]
    conversations: int
    sampled_tokens: int
    response_tokens: Distribution
    turns: Distribution
    engine_seconds: Distribution
    tool_seconds: Distribution
    tool_share: float
    finish_reasons: dict[str, int]
    truncated: float
    versions: dict[str, PolicyVersions]
    samples: list[Sample]


class _Numbers:
    """Collects some numbers of each trajectory. It does not keep the trajectories."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        """The number of trajectories in each file."""
        self.rewards = array("d")
        self.turns = array("q")
        self.engine = array("d")
        self.tools = array("d")
        self.response_tokens = array("q")
        self.sampled_tokens = 0
        self.groups: dict[Any, int] = {}
        """The number of each group, by file and item."""
        self.group_of = array("q")
        """The number of the group of each trajectory that has one."""
        self.named: dict[str, list[float]] = {}
        """By name: the number of trajectories, the sum of rewards, and their weighted sum."""
        self.finish: Counter[str] = Counter()
        self.versions: dict[str, PolicyVersions] = {}

    def add(self, file: int, trajectory: Trajectory) -> None:
        turns = [turn for leaf in trajectory.leaves for turn in leaf.turns]
        self.rewards.append(trajectory.reward)
        self.turns.append(len(turns))
        self.engine.append(sum(turn.seconds for turn in turns))
        self.tools.append(sum(turn.seconds_before for turn in turns))
        self.sampled_tokens += trajectory.sampled_tokens
        for leaf in trajectory.leaves:
            self.response_tokens.append(len(leaf.response_ids))
            self.finish[leaf.finish_reason] += 1
        item = _label(trajectory, "item")
        if item is not None:
            self.group_of.append(self.groups.setdefault((file, item), len(self.groups)))
        for name, value in trajectory.named_rewards.items():
            sums = self.named.setdefault(name, [0, 0.0, 0.0])
            sums[0] += 1
            sums[1] += value
        for reward in (reward for turn in turns for reward in turn.rewards):
            self.named[reward.name][2] += reward.weight * reward.value
        for policy, (oldest, newest) in _version_ranges(trajectory).items():
            known = self.versions.get(policy)
            self.versions[policy] = PolicyVersions(
                oldest=oldest if known is None else min(oldest, known.oldest),
                newest=newest if known is None else max(newest, known.newest),
                mixed=(0 if known is None else known.mixed) + (oldest != newest),
            )


def summarize(files: Sequence[Path], samples: int = 3, tokenizer: Any = None) -> RolloutSummary:
    """Read files of trajectories, one trajectory at a time, and return their summary.

    The files are read twice if samples are shown, because the order of rewards is known only at
    the end.

    Args:
        samples: the maximum number of samples in the summary.
        tokenizer: the tokenizer that decodes them. None: they have token ids.

    Raises:
        UsageError: a file has another format, is truncated, or is damaged.
        OSError: a file cannot be read.
    """
    n = _Numbers()
    for number, file in enumerate(files):
        before = len(n.rewards)
        for trajectory in iter_load(file):
            n.add(number, trajectory)
        n.sizes.append(len(n.rewards) - before)
    rewards = np.asarray(n.rewards, np.float64)
    count, conversations = len(rewards), len(n.response_tokens)
    mean = float(rewards.mean()) if count else math.nan
    tools, engine = math.fsum(n.tools), math.fsum(n.engine)
    grouped = len(n.group_of) == count
    return RolloutSummary(
        files=len(files),
        trajectories=count,
        groups=len(n.groups) if grouped else None,
        reward_mean=mean,
        reward_std=float(rewards.std()) if count else math.nan,
        reward_min=float(rewards.min()) if count else math.nan,
        reward_max=float(rewards.max()) if count else math.nan,
        group_reward_std=_std_within(rewards, np.asarray(n.group_of)) if grouped else math.nan,
        named_rewards={
            name: NamedReward(
                trajectories=having / count,
                mean=total / having,
                weighted=weighted / count,
                share=weighted / count / mean if mean else math.nan,
            )
            for name, (having, total, weighted) in sorted(n.named.items())
        },
        conversations=conversations,
        sampled_tokens=n.sampled_tokens,
        response_tokens=Distribution.of(n.response_tokens),
        turns=Distribution.of(n.turns),
        engine_seconds=Distribution.of(n.engine),
        tool_seconds=Distribution.of(n.tools),
        tool_share=tools / (tools + engine) if tools + engine else math.nan,
        finish_reasons=dict(n.finish.most_common()),
        truncated=n.finish["length"] / conversations if conversations else math.nan,
        versions=dict(sorted(n.versions.items())),
        samples=list(_samples(files, n.sizes, rewards, samples, tokenizer)),
    )


def _std_within(rewards: np.ndarray[Any, Any], groups: np.ndarray[Any, Any]) -> float:
    """Return the mean of the standard deviations of the rewards within each group."""
    if not len(groups):
        return math.nan
    sizes = np.bincount(groups)
    means = np.bincount(groups, rewards) / sizes
    variances = np.bincount(groups, (rewards - means[groups]) ** 2) / sizes
    return float(np.sqrt(variances).mean())


def _version_ranges(trajectory: Trajectory) -> dict[str, tuple[int, int]]:
    """Return, for each policy, the oldest and the newest version that sampled a token."""
    found: dict[str, list[int]] = {}
    for leaf in trajectory.leaves:
        pieces = [(MODEL, leaf.versions)]
        if leaf.lora_versions is not None:
            loras = leaf.lora_versions
            pieces += [(t.lora, loras[t.start : t.stop]) for t in leaf.turns if t.lora]
        for policy, versions in pieces:
            sampled = versions[versions >= 0]
            if len(sampled):
                found.setdefault(policy, []).extend((int(sampled.min()), int(sampled.max())))
    return {policy: (min(ends), max(ends)) for policy, ends in found.items()}


def _samples(
    files: Sequence[Path], sizes: Sequence[int], rewards: Any, wanted: int, tokenizer: Any
) -> Iterator[Sample]:
    """Yield samples at equal distances in the order of rewards, from the best to the worst."""
    count = len(rewards)
    order = np.argsort(-rewards, kind="stable")
    ranks = np.linspace(0, count - 1, min(wanted, count)).round().astype(int)
    rank_of = {int(order[rank]): int(rank) for rank in ranks}
    found: dict[int, Sample] = {}
    start = 0
    for file, size in zip(files, sizes, strict=True):
        last = max((at for at in rank_of if start <= at < start + size), default=-1)
        # The first reading has checked the rest of the file.
        for at, trajectory in enumerate(iter_load(file) if last >= 0 else (), start):
            if at in rank_of:
                found[at] = Sample(
                    rank=rank_of[at] + 1,
                    reward=trajectory.reward,
                    file=str(file),
                    index=at - start,
                    item=_label(trajectory, "item"),
                    sample=_label(trajectory, "sample"),
                    prompt=_shown(trajectory.prompt_ids, tokenizer, _PROMPT),
                    response=_shown(trajectory.response_ids, tokenizer, _RESPONSE),
                )
            if at == last:
                break
        start += size
    yield from sorted(found.values(), key=lambda sample: sample.rank)


def _label(trajectory: Trajectory, name: str) -> int | str | None:
    """Return a value of the metadata if it is a number or a text. ``rollout`` adds numbers."""
    value = trajectory.metadata.get(name)
    return value if isinstance(value, (int, str)) else None


def _shown(ids: Any, tokenizer: Any, limit: int) -> str:
    """Return the text of tokens, or the ids as text. A long text is shortened in the middle."""
    if tokenizer is None:
        text = " ".join(map(str, ids.tolist()))
    else:
        text = tokenizer.decode(ids.tolist(), skip_special_tokens=False)
    if len(text) <= limit:
        return text
    half = (limit - 5) // 2
    return f"{text[:half]} ... {text[-half:]}"


def table_of(summary: RolloutSummary) -> RenderableType:
    """Return the summary as tables for a terminal or a log."""
    s = summary
    facts = Table(title="sglrl rollouts", title_justify="left", show_header=False, min_width=_WIDTH)
    facts.add_column("what", style="bold")
    facts.add_column("value")
    facts.add_row("files", f"{s.files:,}")
    branches = s.conversations - s.trajectories
    more = f", with {branches:,} branches" if branches else ""
    facts.add_row("trajectories", f"{s.trajectories:,}{more}")
    if s.groups is None:
        facts.add_row("groups", "unknown: trajectories have no metadata 'item'")
    else:
        facts.add_row("groups", f"{s.groups:,}, reward std within a group {s.group_reward_std:.4g}")
    facts.add_row(
        "reward",
        f"mean {s.reward_mean:.4g}, std {s.reward_std:.4g}, min {s.reward_min:.4g}, max "
        f"{s.reward_max:.4g}",
    )
    facts.add_row("sampled tokens", f"{s.sampled_tokens:,}")
    reasons = [f"{name or 'no turns'} {count:,}" for name, count in s.finish_reasons.items()]
    facts.add_row("finish reasons", _plain(", ".join(reasons)))
    facts.add_row("truncated", f"{s.truncated:.1%}")
    for policy, v in s.versions.items():
        name = f"versions of {policy}" if policy else "policy versions"
        mixed = f"{v.mixed:,} trajectories mix versions"
        facts.add_row(_plain(name), f"{v.oldest:,} to {v.newest:,}, {mixed}")
    if not math.isnan(s.tool_share):
        facts.add_row("time between turns", f"{s.tool_share:.1%}, the rest in the engine")
    parts: list[RenderableType] = [facts, _distributions(s)]
    if s.named_rewards:
        parts.append(_named_rewards(s))
    if s.samples:
        parts.append(_sample_table(s))
    return Group(*parts)


def _distributions(s: RolloutSummary) -> Table:
    table = Table("", min_width=_WIDTH)
    for column in ("mean", "p50", "p90", "max"):
        table.add_column(column, justify="right")
    for name, d, form in (
        ("response tokens", s.response_tokens, ",.0f"),
        ("turns", s.turns, ",.1f"),
        ("seconds in the engine", s.engine_seconds, ",.2f"),
        ("seconds between turns", s.tool_seconds, ",.2f"),
    ):
        table.add_row(name, *(format(value, form) for value in (d.mean, d.p50, d.p90, d.max)))
    return table


def _named_rewards(s: RolloutSummary) -> Table:
    table = Table("reward", min_width=_WIDTH)
    for column in ("trajectories", "mean", "weighted", "share of reward"):
        table.add_column(column, justify="right")
    for name, r in s.named_rewards.items():
        share = "" if math.isnan(r.share) else f"{r.share:.1%}"
        table.add_row(
            _plain(name), f"{r.trajectories:.1%}", f"{r.mean:.4g}", f"{r.weighted:.4g}", share
        )
    return table


def _sample_table(s: RolloutSummary) -> Table:
    table = Table("sample", "text", show_lines=True, min_width=_WIDTH)
    for sample in s.samples:
        ends = {s.trajectories: "worst, ", 1: "best, "}
        rank = f"{ends.get(sample.rank, '')}{sample.rank:,} of {s.trajectories:,}"
        where = _visible(f"{Path(sample.file).name}[{sample.index}]")
        title = Text.assemble((f"{rank}\nreward {sample.reward:.4g}\n", "bold"), (where, "dim"))
        body = Text.assemble(
            ("prompt: ", "bold"),
            _visible(sample.prompt),
            ("\nresponse: ", "bold"),
            _visible(sample.response),
        )
        table.add_row(title, body)
    return table


def _visible(text: str) -> str:
    """Return a text whose line feeds stay, and whose other control characters are escaped."""
    return "".join(c if c == "\n" or c.isprintable() else repr(c)[1:-1] for c in text)


def _plain(text: str) -> Text:
    """Return a text of a file for a table, without control characters and without markup."""
    return Text(_visible(text))
