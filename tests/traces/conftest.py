"""A client of a fake engine, and the spans that sglrl makes in this process.

OpenTelemetry's provider can be set only once, so these tests set the tracer in its place.
``test_off.py`` sets providers in other processes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from leftovers import no_task_is_left, no_worker_is_left
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import sglrl
from sglrl import tracing

__all__ = ["no_task_is_left", "no_worker_is_left"]


@pytest.fixture
def provider(monkeypatch: pytest.MonkeyPatch) -> Iterator[TracerProvider]:
    """A provider without processors, whose tracer sglrl uses."""
    made = TracerProvider()
    monkeypatch.setattr(tracing, "tracer", made.get_tracer("sglrl"))
    yield made
    made.shutdown()


@pytest.fixture
def spans(provider: TracerProvider) -> InMemorySpanExporter:
    exporter = InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return exporter


@pytest.fixture
async def client() -> AsyncIterator[sglrl.Client]:
    async with sglrl.launch("tiny", engine="fake", vocab_size=512) as client:
        yield client
