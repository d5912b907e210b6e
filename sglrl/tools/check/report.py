"""The results of the check: a struct (``--json`` writes it unchanged) and a table made from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ...inference.completion import Completion
from ..logprob_check import LogprobCheck
from .rollouts import Rollout


class WorkerShare(msgspec.Struct, frozen=True, kw_only=True):
    """The part of the work that one worker did.

    Attributes:
        share: the worker's share of all generated tokens, 0..1.
    """

    worker: int
    requests: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    share: float


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one run. Times are in seconds, rates per second, hit rates 0..1.

    Attributes:
        seconds: time from the start of the first rollout to the end of the last rollout.
        latency_p50, latency_p99: latency of single requests, from ``generate`` to its result.
        cache_hit_rate: share of all prompt tokens that came from a prefix cache.
        ideal_cache_hit_rate: the same share for an ideal cache. All workers share this cache. It
            evicts nothing, and contains each token as soon as the token exists.
    """

    sglrl_version: str
    sglang_version: str
    model: str
    architecture: str
    dtype: str
    device: str
    replicas: int
    in_flight: int
    seed: int
    rollouts: int
    multi_turn_rollouts: int
    requests: int
    prompt_tokens: int
    generated_tokens: int
    start_seconds: float
    seconds: float
    requests_per_second: float
    tokens_per_second: float
    latency_p50: float
    latency_p99: float
    cache_hit_rate: float
    ideal_cache_hit_rate: float
    workers: list[WorkerShare]
    logprobs: LogprobCheck
    passed: bool


def make_report(
    rollouts: Sequence[Rollout],
    check: LogprobCheck,
    *,
    seconds: float,
    start_seconds: float,
    **facts: Any,
) -> Report:
    """Make a report from the rollouts and the logprob check.

    Args:
        rollouts: the rollouts of the run.
        check: the result of the logprob check.
        seconds: time from the start of the first rollout to the end of the last rollout.
        start_seconds: time that the workers took to start.
        **facts: the fields of ``Report`` that do not follow from the other arguments.
    """
    completions = [turn for rollout in rollouts for turn in rollout.turns]
    prompt_tokens = sum(len(c.prompt_ids) for c in completions)
    generated = sum(len(c.output_ids) for c in completions)
    p50, p99 = np.percentile([c.timing.total for c in completions], [50, 99]).tolist()
    return Report(
        rollouts=len(rollouts),
        multi_turn_rollouts=sum(len(rollout.turns) > 1 for rollout in rollouts),
        requests=len(completions),
        prompt_tokens=prompt_tokens,
        generated_tokens=generated,
        start_seconds=start_seconds,
        seconds=seconds,
        requests_per_second=len(completions) / seconds,
        tokens_per_second=generated / seconds,
        latency_p50=p50,
        latency_p99=p99,
        cache_hit_rate=sum(c.cached_tokens for c in completions) / prompt_tokens,
        ideal_cache_hit_rate=ideal_cached_tokens(completions) / prompt_tokens,
        workers=_shares(completions, generated),
        logprobs=check,
        passed=check.passed,
        **facts,
    )


def _shares(completions: Sequence[Completion], generated: int) -> list[WorkerShare]:
    shares = []
    for worker in sorted({c.worker for c in completions}):
        own = [c for c in completions if c.worker == worker]
        tokens = sum(len(c.output_ids) for c in own)
        shares.append(
            WorkerShare(
                worker=worker,
                requests=len(own),
                prompt_tokens=sum(len(c.prompt_ids) for c in own),
                cached_tokens=sum(c.cached_tokens for c in own),
                generated_tokens=tokens,
                share=tokens / generated,
            )
        )
    return shares


def ideal_cached_tokens(completions: Sequence[Completion]) -> int:
    """Return the number of prompt tokens that an unlimited cache serves.

    The requests are assumed to run one after the other, in the given order. The last token of a
    prompt is always computed, because its logits predict the first token of the answer.
    """
    Node = dict[int, Any]
    root: Node = {}
    cached = 0
    for completion in completions:
        prompt = completion.prompt_ids.tolist()
        node, known = root, True
        for i, token in enumerate([*prompt, *completion.output_ids.tolist()]):
            child = node.get(token)
            if child is None:
                child = node[token] = {}
                known = False
            elif known and i < len(prompt) - 1:
                cached += 1
            node = child
    return cached


def table_of(report: Report) -> RenderableType:
    """Return the report as a table for a terminal or a log."""
    r = report
    facts = Table(title="sglrl check", title_justify="left", show_header=False, min_width=60)
    facts.add_column("what", style="bold")
    facts.add_column("value")
    for name, value in (
        ("model", f"{r.architecture}, {r.dtype}, on {r.device}"),
        ("workers", f"{r.replicas} x SGLang {r.sglang_version}, up in {r.start_seconds:.1f} s"),
        (
            "rollouts",
            f"{r.rollouts:,} ({r.multi_turn_rollouts:,} multi-turn), {r.in_flight} in flight",
        ),
        ("requests", f"{r.requests:,} in {r.seconds:.2f} s ({r.requests_per_second:,.0f}/s)"),
        ("tokens", f"{r.prompt_tokens:,} prompt, {r.generated_tokens:,} generated"),
        ("tokens/s", f"{r.tokens_per_second:,.0f} generated"),
        ("latency", f"p50 {r.latency_p50 * 1000:,.0f} ms, p99 {r.latency_p99 * 1000:,.0f} ms"),
        (
            "prefix cache",
            f"{r.cache_hit_rate:.1%} of prompt tokens "
            f"(an ideal cache: {r.ideal_cache_hit_rate:.1%})",
        ),
        (
            "logprobs",
            f"{r.logprobs.tokens:,} compared with transformers, largest difference "
            f"{r.logprobs.largest_difference:.2e} (tolerance "
            f"{r.logprobs.tolerance:.0e})",
        ),
    ):
        facts.add_row(name, value)
    workers = Table(min_width=60)
    for column in ("worker", "requests", "prompt tokens", "cached", "generated", "share"):
        workers.add_column(column, justify="right")
    for w in r.workers:
        workers.add_row(
            str(w.worker),
            f"{w.requests:,}",
            f"{w.prompt_tokens:,}",
            f"{w.cached_tokens / w.prompt_tokens:.1%}",
            f"{w.generated_tokens:,}",
            f"{w.share:.1%}",
        )
    if r.passed:
        verdict = Text("passed: our logprobs are the model's", style="green")
    else:
        verdict = Text(
            f"FAILED: the largest difference exceeds the tolerance\n{r.logprobs.worst}",
            style="bold red",
        )
    return Group(facts, workers, verdict)
