"""The trace of a call continues in the process of an actor or an agent, if it has a provider."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

import sglrl
from sglrl import tracing

from .exported import Traced, TracedAgent, ids, tree, written


def parents(path: Path) -> dict[str, tuple[str, str | None]]:
    """Return the trace and the parent of each written span by its name."""
    return {
        span["name"]: (span["context"]["trace_id"], span["parent_id"]) for span in written(path)
    }


async def test_spans_of_an_actor(
    spans: InMemorySpanExporter, provider: TracerProvider, tmp_path: Path
) -> None:
    path = tmp_path / "spans"
    async with sglrl.spawn(Traced, str(path)) as actors:
        with provider.get_tracer("test").start_as_current_span("step"):
            assert await actors.add(1, 2) == 3
            assert [i async for i in actors.stream.count(2)] == [0, 1]
            with pytest.raises(sglrl.RemoteError):
                await actors.fail()
    found = {span.name: span for span in spans.get_finished_spans()}
    children: list[Any] = [(f"actor.{name}", []) for name in ("add", "count", "fail")]
    assert tree(spans.get_finished_spans()) == [("step", children)]
    assert parents(path) == {
        "inside": ids(found["actor.add"]),
        "inside the stream": ids(found["actor.count"]),
    }
    assert dict(found["actor.add"].attributes or {}) == {
        "rpc.system.name": "sglrl",
        "rpc.method": "add",
    }
    assert found["actor.fail"].status.status_code is StatusCode.ERROR
    (event,) = found["actor.fail"].events
    message = str((event.attributes or {})["exception.message"])
    assert message.startswith("ValueError: no\n")


async def test_an_actor_without_a_provider(spans: InMemorySpanExporter) -> None:
    async with sglrl.spawn(Traced, "") as actors:
        assert await actors.add(1, 2) == 3
        assert await actors.broadcast.add(1, 2) == [3]
        async for _ in actors.stream.count(2):
            break
    assert [span.name for span in spans.get_finished_spans()][:2] == ["actor.add"] * 2


async def test_spans_of_an_actor_whose_caller_has_none(tmp_path: Path) -> None:
    path = tmp_path / "spans"
    assert tracing.tracer is None
    async with sglrl.spawn(Traced, str(path)) as actors:
        await actors.add(1, 2)
    assert [parent for _, parent in parents(path).values()] == [None]


@pytest.mark.parametrize("traced", [True, False])
async def test_spans_of_agents(
    request: pytest.FixtureRequest, client: sglrl.Client, tmp_path: Path, traced: bool
) -> None:
    """Each sample is a child of the span in which the run was started, or has no parent."""
    path = tmp_path / "spans"
    agent = functools.partial(TracedAgent, str(path))
    items = [{"input_ids": [1]}, {"input_ids": [1], "fails": True}]
    run = sglrl.rollout(client, agent, items, group_size=1, processes=1, retries=0)
    if traced:
        exporter = request.getfixturevalue("spans")
        tracer = request.getfixturevalue("provider").get_tracer("test")
        with tracer.start_as_current_span("step"):
            async with run:
                assert len([group async for group in run]) == 1
        (step,) = exporter.get_finished_spans()
        parent: tuple[str, str | None] = ids(step)
    else:
        async with run:
            assert len([group async for group in run]) == 1
    made = written(path)
    names = {span["context"]["span_id"]: span["name"] for span in made}
    samples = [span for span in made if span["name"] == "sample"]
    if traced:
        assert {(s["context"]["trace_id"], s["parent_id"]) for s in samples} == {parent}
    else:
        assert [s["parent_id"] for s in samples] == [None, None]
    below = sorted((span["name"], names.get(span["parent_id"])) for span in made)
    assert below == [
        *[("call", "turn")] * 2,
        *[("engine", "call")] * 2,
        *[("sample", None)] * 2,
        *[("turn", "sample")] * 2,
    ]
    ends = {s["attributes"]["sglrl.sample.group"]: s for s in samples}
    assert ends[0]["attributes"]["sglrl.sample.end"] == "done"
    assert ends[0]["attributes"]["sglrl.sample.reward"] == 1.0
    assert ends[1]["attributes"]["sglrl.sample.end"] == "failed"
    assert ends[1]["events"][0]["attributes"]["exception.message"] == "a bad item"
    # The call was made in another process than the one that launched the engine.
    engines = [span["attributes"]["sglrl.worker"] for span in made if span["name"] == "engine"]
    assert engines == [0, 0]
