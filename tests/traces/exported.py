"""What the tests read of exported spans; and an actor and an agent that write spans to a file."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

import sglrl

Tree = list[tuple[str, Any]]


def tree(spans: Sequence[ReadableSpan]) -> Tree:
    """Return the names of spans, each with the tree of its children, in the order of their starts.

    Check that the times of a child are within those of its parent.
    """
    by_id = {span.context.span_id: span for span in spans}
    children: dict[int | None, list[ReadableSpan]] = {}
    for span in sorted(spans, key=lambda span: span.start_time or 0):
        parent = by_id.get(span.parent.span_id) if span.parent else None
        children.setdefault(parent and parent.context.span_id, []).append(span)
        if parent is not None:
            assert parent.start_time <= span.start_time <= span.end_time <= parent.end_time, (
                parent.name,
                span.name,
            )
            assert span.context.trace_id == parent.context.trace_id

    def below(id_: int | None) -> Tree:
        return [(span.name, below(span.context.span_id)) for span in children.get(id_, [])]

    return below(None)


def ids(span: ReadableSpan) -> tuple[str, str]:
    """Return the id of the trace and of the span, as ``ReadableSpan.to_json`` writes them."""
    return f"0x{span.context.trace_id:032x}", f"0x{span.context.span_id:016x}"


class FileExporter(SpanExporter):
    """Appends each span to a file, as one line of JSON."""

    def __init__(self, path: str) -> None:
        self._path = path

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        with open(self._path, "a") as file:
            file.writelines(span.to_json(indent=None) + "\n" for span in spans)
        return SpanExportResult.SUCCESS


def write_to(path: str) -> None:
    """Set the provider of this process. It writes spans only when it is flushed."""
    provider = TracerProvider()
    provider.add_span_processor(
        BatchSpanProcessor(FileExporter(path), schedule_delay_millis=3_600_000)
    )
    trace.set_tracer_provider(provider)


def write_to_file_of_variable() -> None:
    """Set the provider of this process, for the environment variable ``SGLRL_TRACES``."""
    write_to(os.environ["SPANS"])


def written(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


class Traced(sglrl.Actor):
    """Makes a span in each call."""

    def __init__(self, path: str) -> None:
        if path:
            write_to(path)

    @sglrl.endpoint
    async def add(self, a: int, b: int) -> int:
        with trace.get_tracer("test").start_as_current_span("inside"):
            return a + b

    @sglrl.endpoint
    async def count(self, n: int) -> AsyncIterator[int]:
        with trace.get_tracer("test").start_as_current_span("inside the stream"):
            for i in range(n):
                yield i

    @sglrl.endpoint
    async def fail(self) -> None:
        raise ValueError("no")


class TracedAgent:
    """An agent of one turn that fails if the item says so."""

    def __init__(self, path: str) -> None:
        write_to(path)

    async def __call__(self, session: sglrl.Session, item: dict[str, Any]) -> float:
        await session.generate(max_new_tokens=2)
        if item.get("fails"):
            raise ValueError("a bad item")
        return 1.0
