"""Print the names of the spans that a program makes: ``python off_program.py CASE``.

The cases say which provider the program sets, if any, and when.
"""

from __future__ import annotations

import sys
from typing import Any

CASE = sys.argv[1]
if CASE == "blocked":
    # As if the package were not installed.
    sys.modules["opentelemetry"] = None  # type: ignore[assignment]

import sglrl  # noqa: E402
from sglrl import tracing  # noqa: E402

made: list[str] = []


def set_provider() -> None:
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    if CASE == "no-op":
        trace.set_tracer_provider(trace.NoOpTracerProvider())
        return

    class Exporter(InMemorySpanExporter):
        def export(self, spans: Any) -> Any:
            made.extend(span.name for span in spans)
            return super().export(spans)

    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(Exporter()))
    trace.set_tracer_provider(provider)


class Adder(sglrl.Actor):
    @sglrl.endpoint
    async def add(self, a: int, b: int) -> int:
        return a + b


async def agent(session: sglrl.Session, item: Any) -> float:
    assert bool(session.headers) == (tracing.tracer is not None)
    await session.generate(max_new_tokens=2)
    return 1.0


async def main() -> None:
    if CASE == "api":
        import opentelemetry.trace  # noqa: F401
    if CASE in ("before launch and sample", "no-op", "disabled"):
        set_provider()
    async with (
        sglrl.launch("tiny", engine="fake", vocab_size=512) as client,
        sglrl.spawn(Adder) as adders,
    ):
        if CASE == "before the sample":
            set_provider()
        items = [{"input_ids": [1]}]
        for processes in (None, 1):
            run = sglrl.rollout(client, agent, items, group_size=1, processes=processes)
            async with run:
                assert len([group async for group in run]) == 1
        await client.generate(input_ids=[1], max_new_tokens=2)
        assert await adders.add(1, 2) == 3


sglrl.run(main())
if CASE in ("blocked", "nothing"):
    # OpenTelemetry was not imported.
    assert sys.modules.get("opentelemetry") is None
print(tracing.tracer is not None, *made)
