"""The summary of an evaluation: a struct, which ``--json`` prints, and a table for a terminal."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import comb, fsum

import msgspec
from rich.table import Table

from ...errors import UsageError
from .results import Outcome

PASSED = 1.0
"""A sample with at least this score has passed."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The results of all items, including the items that earlier runs finished.

    Attributes:
        mean_score: mean score of all samples. None without ``--score``.
        pass_at_k: for each k, the unbiased estimate of pass@k, averaged over all items. Empty
            without ``--score``.
        truncated: share of the samples that ended at their maximum length, 0..1.
        tokens: number of sampled tokens.
        seconds: duration of the last run, without the start of its engines.
        tokens_per_second: tokens per second that the last run sampled. None if it sampled nothing.
    """

    items: int
    samples: int
    mean_score: float | None
    pass_at_k: dict[int, float]
    truncated: float
    tokens: int
    seconds: float
    tokens_per_second: float | None


def powers_of_two(most: int) -> tuple[int, ...]:
    """Return 1, 2, 4, ... up to ``most``."""
    return tuple(1 << i for i in range(most.bit_length()))


def summarize(
    finished: Collection[Sequence[Outcome]], ks: Sequence[int], *, new_tokens: int, seconds: float
) -> Summary:
    """Summarize the outcomes of the items.

    Args:
        finished: the outcomes of all samples of each item.
        ks: the values of k for pass@k. They are not used without scores.
        new_tokens: number of tokens that this run has sampled.
        seconds: duration of this run.
    """
    outcomes = [outcome for item in finished for outcome in item]
    scores = [outcome.score for outcome in outcomes if outcome.score is not None]
    passed = [sum((o.score or 0.0) >= PASSED for o in item) for item in finished]
    counts = [*zip(map(len, finished), passed, strict=True)]
    # With ``fsum``, the order of the items, which differs between runs, does not change the result.
    return Summary(
        items=len(finished),
        samples=len(outcomes),
        mean_score=fsum(scores) / len(scores) if scores else None,
        pass_at_k={k: fsum(pass_at_k(n, c, k) for n, c in counts) / len(counts) for k in ks}
        if scores
        else {},
        truncated=sum(o.finish_reason == "length" for o in outcomes) / len(outcomes),
        tokens=sum(o.tokens for o in outcomes),
        seconds=seconds,
        tokens_per_second=new_tokens / seconds if new_tokens else None,
    )


def table_of(summary: Summary) -> Table:
    """Return the summary as a table for a terminal or a log."""
    s = summary
    table = Table(title="sglrl eval", title_justify="left", show_header=False, min_width=40)
    table.add_column("what", style="bold")
    table.add_column("value")
    table.add_row("items", f"{s.items:,}")
    table.add_row("samples", f"{s.samples:,}")
    if s.mean_score is not None:
        table.add_row("mean score", f"{s.mean_score:.4f}")
    for k, share in s.pass_at_k.items():
        table.add_row(f"pass@{k}", f"{share:.2%}")
    table.add_row("truncated", f"{s.truncated:.1%}")
    table.add_row("tokens", f"{s.tokens:,}")
    if s.tokens_per_second is not None:
        table.add_row("tokens/s", f"{s.tokens_per_second:,.0f}, in {s.seconds:.1f} s")
    return table


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Return the unbiased estimate of pass@k for one item.

    Of all subsets of ``k`` samples, it is the share that contains at least one passed sample:
    1 - C(n - c, k) / C(n, k), equation 1 of Chen et al. 2021 (https://arxiv.org/abs/2107.03374).

    Args:
        samples: number of samples of the item, n.
        passed: how many of the samples passed, c.
        k: number of samples to choose, 1..n.

    Raises:
        UsageError: a number is out of range.
    """
    if not 0 <= passed <= samples:
        raise UsageError(f"passed must be in 0..{samples}, got {passed}")
    if not 1 <= k <= samples:
        raise UsageError(f"k must be in 1..{samples}, the number of samples, got {k}")
    # The integers are exact, and Python rounds their quotient correctly.
    return 1.0 - comb(samples - passed, k) / comb(samples, k)
