"""The span ``update`` of one weight update, with a span for each of its phases."""

from __future__ import annotations

import time
from collections.abc import Awaitable
from typing import Any

from .. import tracing
from .update_report import UpdateReport


async def traced_update(update: Awaitable[UpdateReport]) -> UpdateReport:
    """Run an update inside its span."""
    with tracing.span("update", {}) as span:
        report = await update
        if span is not None:
            _end(span, report)
    return report


def _end(span: Any, report: UpdateReport) -> None:
    """End the span when the update ended. Its task may run later, while a trainer computes."""
    span.set_attributes(
        {
            "sglrl.version": report.version,
            "sglrl.update.bytes": report.bytes,
            "sglrl.update.workers": report.workers,
            "sglrl.update.mode": report.mode,
            "sglrl.update.attempts": report.attempts,
            "sglrl.update.gather_ms": report.gather_ms,
            "sglrl.update.broadcast_ms": report.broadcast_ms,
            "sglrl.update.pause_ms": max(report.pause_ms, default=0.0),
        }
    )
    if report.lora:
        span.set_attribute("sglrl.lora", report.lora)
    # The phases follow each other, and the last one ends with the update.
    ended = end = time.monotonic() - (time.time() - report.ended if report.ended else 0.0)
    for phase in ("commit", "stage", "prepare", "join"):
        begin = end - getattr(report, f"{phase}_ms") / 1e3
        if begin < end:
            made = tracing.start(f"update.{phase}", {}, parent=tracing.under(span), at=begin)
            tracing.end(made, at=end)
        end = begin
    tracing.end(span, at=ended)
