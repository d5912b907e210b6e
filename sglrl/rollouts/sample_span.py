"""The span ``sample``: one attempt of a sample, in the process that runs its agent."""

from __future__ import annotations

from typing import Any, Final, Literal

from .. import tracing
from .task_ending import name_of

RUN_ENDED: Final = "the run has ended"


def sample_span(agent: Any, group: int, sample: int, attempt: int) -> Any:
    """Return the block in which the agent runs. See ``tracing.span``.

    Args:
        group: the index of the item.
        sample: the index of the sample in its group.
        attempt: the number of earlier attempts of the sample.
    """
    if tracing.tracer is None:
        return tracing.OFF
    attributes = {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.agent.name": name_of(agent),
        "sglrl.sample.group": group,
        "sglrl.sample.index": sample,
        "sglrl.sample.attempt": attempt,
    }
    return tracing.span("sample", attributes)


def end_sample_span(
    span: Any,
    end: Literal["done", "failed", "late", "given up"],
    *,
    reward: float | None = None,
    error: BaseException | None = None,
    reason: str = "",
) -> None:
    """End the span of a sample, unless it is None or has ended.

    Args:
        reason: the reason why the sample was given up.
    """
    if span is None or not span.is_recording():
        return
    span.set_attribute("sglrl.sample.end", end)
    if reward is not None:
        span.set_attribute("sglrl.sample.reward", reward)
    if reason:
        span.set_attribute("sglrl.sample.reason", reason)
    tracing.end(span, error)
