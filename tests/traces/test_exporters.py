"""An exporter or a span processor that raises or hangs harms no call."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import (
    BatchSpanProcessor,
    SimpleSpanProcessor,
    SpanExporter,
    SpanExportResult,
)

import sglrl
from sglrl import tracing

from .exported import Traced


class Raising(SpanExporter):
    """An exporter that always raises."""

    def __init__(self) -> None:
        self.count = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.count += len(spans)
        raise OSError("no connection")


class Hanging(SpanExporter):
    """An exporter that waits for ``over``."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.over = threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.begun.set()
        self.over.wait()
        return SpanExportResult.SUCCESS


class RaisingProcessor(SpanProcessor):
    """A processor that raises at the start or at the end of each span."""

    def __init__(self, at: str) -> None:
        self._at = at
        self.count = 0

    def _raise(self, at: str) -> None:
        if at == self._at:
            self.count += 1
            raise LookupError(at)

    def on_start(self, span: Any, parent_context: Any = None) -> None:
        self._raise("start")

    def on_end(self, span: ReadableSpan) -> None:
        self._raise("end")


async def everything_works(client: sglrl.Client) -> None:
    async def agent(session: sglrl.Session, item: Any) -> float:
        await session.generate(max_new_tokens=2)
        if item["id"] == 3:
            raise ValueError("a bad item")
        return 1.0

    items = [{"input_ids": [1], "id": i} for i in range(8)]
    async with sglrl.rollout(client, agent, items, group_size=1, retries=0) as run:
        assert len([group async for group in run]) == 7
    await client.update_weights({"weight": torch.zeros(2, 2)})
    assert len(await client.generate(input_ids=[1], n=8, max_new_tokens=2)) == 8
    async for _ in client.stream(input_ids=[1], max_new_tokens=2):
        pass
    async with sglrl.spawn(Traced, "") as actors:
        assert await actors.add(1, 2) == 3
        assert [i async for i in actors.stream.count(2)] == [0, 1]


async def test_an_exporter_that_raises(client: sglrl.Client, provider: TracerProvider) -> None:
    exporter = Raising()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    await everything_works(client)
    assert exporter.count > 30


@pytest.mark.parametrize("at", ["start", "end"])
async def test_a_processor_that_raises(
    client: sglrl.Client, provider: TracerProvider, at: str
) -> None:
    processor = RaisingProcessor(at)
    provider.add_span_processor(processor)
    await everything_works(client)
    assert processor.count > 30


async def test_an_exporter_that_hangs(client: sglrl.Client, provider: TracerProvider) -> None:
    exporter = Hanging()
    provider.add_span_processor(
        BatchSpanProcessor(exporter, max_queue_size=16, max_export_batch_size=1)
    )
    try:
        await everything_works(client)
        assert exporter.begun.is_set()
    finally:
        exporter.over.set()


def test_the_exit_of_a_worker_does_not_wait_for_an_exporter_that_hangs(
    provider: TracerProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter = Hanging()
    provider.add_span_processor(BatchSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    provider.get_tracer("test").start_span("one").end()
    try:
        tracing.flush(0.01)
        exporter.begun.wait()
    finally:
        exporter.over.set()
