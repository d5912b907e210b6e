"""The spans ``call`` and ``engine`` of an engine call, and the attributes of a turn's span.

Only ``call`` has ``gen_ai.usage``, so a program that adds these values counts each token once.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from .. import tracing
from ..core.calls import Call
from ..driver.driver import now
from .completion import Completion, NextTokenLogprobs, ScoreLogprobs, Scores


def begin_call_span(call: Call, model: str) -> Any:
    """Start the span of a call. ``end_call_span`` ends it."""
    attributes = {
        "gen_ai.provider.name": "sglrl",
        "gen_ai.request.model": model,
        "sglrl.endpoint": call.endpoint,
    }
    if call.endpoint == "generate":
        attributes["gen_ai.operation.name"] = "text_completion"
    # A call of ``submit_all`` is not submitted yet.
    return tracing.start("call", attributes, kind="CLIENT", at=call.submitted_at or None)


def trace_call(call: Call, future: asyncio.Future[Any], model: str) -> None:
    """Make the span of a call. It ends when ``future``, which gets the result, is done."""
    future.add_done_callback(partial(_ended, begin_call_span(call, model), call))


def _ended(span: Any, call: Call, future: asyncio.Future[Any]) -> None:
    if future.cancelled():
        end_call_span(span, call, asyncio.CancelledError())
    elif (error := future.exception()) is not None:
        end_call_span(span, call, error)
    else:
        end_call_span(span, call, future.result())


def end_call_span(span: Any, call: Call, outcome: Any) -> None:
    """End the span of a call. If the call was sent to a worker, add the span ``engine``.

    Args:
        outcome: the result of the call, or its exception.
    """
    if span is None or not span.is_recording():
        return
    error = outcome if isinstance(outcome, BaseException) else None
    attributes: dict[str, Any] = {"sglrl.attempts": call.attempts}
    # In a client of ``connect``, only the answer names the worker.
    if call.worker is not None and not isinstance(error, asyncio.CancelledError):
        attributes["sglrl.worker"] = call.worker.index
    span.set_attributes(attributes)
    span.set_attributes(_of_result(call, outcome))
    if call.sent_at:
        engine = tracing.start("engine", attributes, parent=tracing.under(span), at=call.sent_at)
        ended = outcome.finished_at if isinstance(outcome, Completion) else now()
        if engine is not None and (call.first_at or isinstance(outcome, Completion)):
            tracing.add_event(engine, "first token", call.first_at or ended)
        tracing.end(engine, error, at=ended)
    tracing.end(span, error)


def _of_result(call: Call, result: Any) -> dict[str, Any]:
    match result:
        case Completion():
            # A call that continues a turn has the earlier tokens of the turn in its result.
            begun = getattr(call.reply, "begun", None)
            before = 0 if begun is None else len(begun.output_ids)
            return {
                "gen_ai.usage.input_tokens": result.prompt_tokens,
                "gen_ai.usage.output_tokens": len(result.output_ids) - before,
                "gen_ai.usage.cache_read.input_tokens": result.cached_tokens,
                "gen_ai.response.finish_reasons": [result.finish_reason],
                "sglrl.resumed": result.resumed,
                "sglrl.version": result.chunks[-1].version,
            }
        case Scores() | ScoreLogprobs() | NextTokenLogprobs():
            return {
                "gen_ai.usage.input_tokens": len(call.args.input_ids) // 4,  # type: ignore[union-attr]
                "gen_ai.usage.output_tokens": 0,
                "sglrl.version": result.version,
            }
    return {}


def turn_attributes(completion: Completion) -> dict[str, Any]:
    """Return the attributes of the span of a finished turn."""
    return {
        "gen_ai.response.finish_reasons": [completion.finish_reason],
        "sglrl.prompt_tokens": completion.prompt_tokens,
        "sglrl.new_tokens": len(completion.output_ids),
        "sglrl.cached_tokens": completion.cached_tokens,
        "sglrl.version": completion.chunks[-1].version,
        "sglrl.worker": completion.worker,
    }
