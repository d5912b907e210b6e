"""``evaluate``: sample and score every item of a data set, and compute pass@k."""

from __future__ import annotations

import inspect
import time
from collections.abc import (
    AsyncIterable,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Mapping,
    Sequence,
)
from math import comb, fsum
from typing import TYPE_CHECKING, Any, Unpack

import msgspec

from ..config import GatewayOptions
from ..errors import UsageError
from ..sessions.options import RolloutSessionKeywords
from .agent import Agent
from .group import Group
from .run import rollout

if TYPE_CHECKING:
    from ..client.client import Client
    from ..sessions.session import Session

PASSED = 1.0
"""A sample with at least this score has passed."""
Score = Callable[[Any, str], "float | Awaitable[float]"]


class Outcome(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a summary needs of a sample.

    Attributes:
        finish_reason: the reason why the last turn ended, as in ``Completion``.
        tokens: number of sampled tokens.
        score: the score, or None if samples are not scored.
    """

    finish_reason: str
    tokens: int
    score: float | None = None


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The results of all items.

    Attributes:
        items: number of items.
        samples: number of samples of all items.
        mean_score: mean score of all samples, or None without scores.
        pass_at_k: for each k, the unbiased estimate of pass@k, averaged over all items. Empty
            without scores.
        truncated: share of the samples that ended at their maximum length, 0..1.
        tokens: number of sampled tokens.
        seconds: duration of the run, without the start of its engines.
        tokens_per_second: tokens per second that the run sampled. None if it sampled nothing.
    """

    items: int
    samples: int
    mean_score: float | None
    pass_at_k: dict[int, float]
    truncated: float
    tokens: int
    seconds: float
    tokens_per_second: float | None


class Evaluation(Summary, frozen=True, kw_only=True):
    """The result of ``evaluate``.

    Attributes:
        groups: the trajectories of each item, in the order of the items.
    """

    groups: tuple[Group, ...]

    def __repr__(self) -> str:
        passed = "".join(f", pass@{k} {share:.1%}" for k, share in self.pass_at_k.items())
        score = "" if self.mean_score is None else f", mean score {self.mean_score:.4g}"
        return f"<Evaluation of {self.items} items, {self.samples} samples{score}{passed}>"


async def evaluate(
    client: Client,
    items: Iterable[Any] | AsyncIterable[Any],
    score: Score | None = None,
    *,
    agent: Agent | None = None,
    samples: int = 1,
    k: Sequence[int] | None = None,
    concurrency: int | None = None,
    timeout: float | None = None,
    open_session: Callable[[Any], Mapping[str, Any]] | None = None,
    processes: int | None = None,
    gateway: bool | GatewayOptions = False,
    progress: bool | None = None,
    seed: int | None = None,
    **session: Unpack[RolloutSessionKeywords],
) -> Evaluation:
    """Sample every item, score the samples, and compute pass@k.

    ::

        def exact(item, text):
            return text.strip() == item["answer"]

        result = await sglrl.evaluate(client, heldout, exact, samples=4, seed=0, max_new_tokens=32)
        print(result.mean_score, result.pass_at_k[4])

    It may run while ``sglrl.rollout`` samples from the same client and while weights change. The
    versions that sampled each token are in ``groups``. ``sglrl eval`` does the same for a file, and
    continues after a kill.

    Args:
        items: the items, as the data set of ``rollout``.
        score: ``score(item, text)`` returns the score of the text of a sample, a number or a bool.
            It may be async. A sample has one turn.
        agent: instead of ``score``, an agent as in ``rollout``, for samples of several turns or
            with tools. The reward is the score.
        samples: the number of samples of each item.
        k: the values of k for pass@k, each from 1 to ``samples``. A sample passes with a score of
            at least 1. None: 1, 2, 4, ... up to ``samples``.
        seed: makes the samples repeatable. Each sample has a seed of its own, derived from it.
        concurrency, timeout, open_session, processes, gateway, progress, **session: as in
            ``rollout``. The sampling parameters are among them.

    Raises:
        UsageError: an argument is wrong, or there is no item.
        DeadlineExceeded: a sample took longer than ``timeout`` seconds.
        Exception: what ``score`` or ``agent`` raised. All other samples are cancelled.
    """
    if (score is None) == (agent is None):
        raise UsageError("give either score or agent")
    if score is not None:
        if not callable(score):
            raise UsageError(f"score must be a function of an item and a text, got {score!r:.100}")
        agent = _one_turn(score)
    assert agent is not None
    run = rollout(
        client,
        agent,
        items,
        group_size=samples,
        min_group=samples,
        on_error="raise",
        concurrency=concurrency,
        timeout=timeout,
        open_session=open_session,
        processes=processes,
        gateway=gateway,
        progress=progress,
        seed=seed,
        **session,
    )
    ks = powers_of_two(samples) if k is None else _checked_ks(k, samples)
    begun = time.perf_counter()
    groups = [group async for group in run]
    seconds = time.perf_counter() - begun
    if not groups:
        raise UsageError("items is empty, so there is nothing to evaluate")
    groups.sort(key=lambda group: group.index)
    outcomes = [outcomes_of(group) for group in groups]
    tokens = sum(group.tokens for group in groups)
    summary = summarize(outcomes, ks, new_tokens=tokens, seconds=seconds)
    return Evaluation(**msgspec.structs.asdict(summary), groups=tuple(groups))


def _one_turn(score: Score) -> Agent:
    """Return an agent that samples one turn. The score of its text is the reward."""

    async def agent(session: Session, item: Any) -> Any:
        turn = await session.generate()
        value = score(item, turn.text)
        return await value if inspect.isawaitable(value) else value

    return agent


def _checked_ks(ks: Sequence[int], samples: int) -> tuple[int, ...]:
    for k in ks:
        if type(k) is not int or not 1 <= k <= samples:
            raise UsageError(f"k must be in 1..{samples}, the number of samples, got {k!r}")
    return tuple(ks)


def outcomes_of(group: Group, *, scored: bool = True) -> list[Outcome]:
    """Return the outcome of each sample of an item."""
    return [
        Outcome(
            finish_reason=sample.finish_reason,
            tokens=sample.sampled_tokens,
            score=sample.reward if scored else None,
        )
        for sample in group.trajectories
    ]


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
