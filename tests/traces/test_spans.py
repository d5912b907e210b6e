"""The spans of rollouts, calls and updates: their parents, attributes and errors."""

from __future__ import annotations

import asyncio
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.policies import until_running
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from sessions.families import FAMILIES, family_tokenizer

import sglrl
from sglrl.core.calls import Call

from .exported import Traced, tree

CALL = ("call", [("engine", [])])
TURN = ("turn", [CALL])


async def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first number
        b: the second number
    """
    return a + b


def named(spans: InMemorySpanExporter, name: str) -> list[ReadableSpan]:
    return [span for span in spans.get_finished_spans() if span.name == name]


def exceptions(span: ReadableSpan) -> list[str]:
    return [str(event.attributes["exception.message"]) for event in span.events]  # type: ignore[index]


async def test_a_rollout_with_tools(spans: InMemorySpanExporter, tmp_path: Path) -> None:
    tokenizer = family_tokenizer(tmp_path, FAMILIES["qwen3"])
    wanted = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
    texts = [wanted % ("add", '{"a": 1, "b": 2}'), wanted % ("none", "{}"), "3"]
    answers = [[*tokenizer.encode(text), tokenizer.eos_token_id] for text in texts]
    async with (
        sglrl.launch(tmp_path, engine="fake", answers=answers, context_length=4096) as client,
        sglrl.spawn(Traced, "") as actors,
    ):

        async def agent(session: sglrl.Session, item: Any) -> float:
            turn = await session.run_tools({"add": actors.add}, max_new_tokens=500)
            assert turn.text == "3"
            return 0.5

        items = [{"messages": [{"role": "user", "content": "1 + 2?"}]}]
        async with sglrl.rollout(client, agent, items, group_size=1, tools=[add]) as run:
            (group,) = [group async for group in run]
    (trajectory,) = group.trajectories
    tools = [("tool", [("actor.add", [])]), ("tool", [])]
    assert tree(spans.get_finished_spans()) == [("sample", [TURN, tools[0], TURN, tools[1], TURN])]

    (sample,) = named(spans, "sample")
    assert dict(sample.attributes or {}) == {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.agent.name": f"{__name__}.test_a_rollout_with_tools.<locals>.agent",
        "sglrl.sample.group": 0,
        "sglrl.sample.index": 0,
        "sglrl.sample.attempt": 0,
        "sglrl.sample.end": "done",
        "sglrl.sample.reward": 0.5,
    }
    turns = sorted(named(spans, "turn"), key=lambda span: span.start_time or 0)
    assert [dict(turn.attributes or {}) for turn in turns] == [
        {
            "gen_ai.response.finish_reasons": ("stop",),
            "sglrl.prompt_tokens": turn.prompt_tokens,
            "sglrl.new_tokens": turn.stop - turn.start,
            "sglrl.cached_tokens": turn.cached_tokens,
            "sglrl.version": 0,
            "sglrl.worker": 0,
        }
        for turn in trajectory.turns
    ]
    good, bad = sorted(named(spans, "tool"), key=lambda span: span.start_time or 0)
    assert good.attributes is not None
    assert good.attributes["gen_ai.tool.name"] == "add"
    assert good.status.status_code is StatusCode.UNSET
    assert bad.status.status_code is StatusCode.ERROR
    assert exceptions(bad) == ["there is no tool 'none'; there are: add"]


async def test_a_failed_tool_and_a_tool_in_a_thread(
    spans: InMemorySpanExporter, provider: TracerProvider, tmp_path: Path
) -> None:
    tokenizer = family_tokenizer(tmp_path, FAMILIES["qwen3"])
    text = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    answers = [[*tokenizer.encode(text), tokenizer.eos_token_id]]

    def work(a: int, b: int) -> int:
        with provider.get_tracer("test").start_as_current_span("inside"):
            raise ValueError("broken")

    async with (
        sglrl.launch(tmp_path, engine="fake", answers=answers, context_length=4096) as client,
        client.session(messages=[{"role": "user", "content": "?"}], tools=[add]) as session,
    ):
        await session.run_tools({"add": work}, max_new_tokens=500, max_turns=2)
    assert tree(spans.get_finished_spans()) == [TURN, ("tool", [("inside", [])]), TURN]
    (tool,) = named(spans, "tool")
    assert exceptions(tool) == ["broken"]
    assert (tool.attributes or {})["error.type"] == "ValueError"


async def test_a_failed_sample_has_the_exception(
    spans: InMemorySpanExporter, client: sglrl.Client
) -> None:
    async def agent(session: sglrl.Session, item: dict[str, Any]) -> float:
        await session.generate(max_new_tokens=2)
        if item["id"]:
            raise ValueError("a bad item")
        return 1.0

    items = [{"input_ids": [1], "id": 0}, {"input_ids": [1], "id": 1}]
    run = sglrl.rollout(client, agent, items, group_size=1, retries=1)
    assert len([group async for group in run]) == 1
    assert tree(spans.get_finished_spans()) == [("sample", [TURN])] * 3
    found = {}
    for sample in named(spans, "sample"):
        of = sample.attributes or {}
        key = of["sglrl.sample.group"], of["sglrl.sample.attempt"], of["sglrl.sample.end"]
        found[key] = exceptions(sample), sample.status.status_code
    assert found == {
        (0, 0, "done"): ([], StatusCode.UNSET),
        (1, 0, "failed"): (["a bad item"], StatusCode.ERROR),
        (1, 1, "failed"): (["a bad item"], StatusCode.ERROR),
    }


@pytest.mark.parametrize("stubborn", [False, True])
async def test_a_late_sample(
    spans: InMemorySpanExporter,
    client: sglrl.Client,
    stubborn: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Also if the agent ignores its cancellation."""
    monkeypatch.setattr("sglrl.rollouts.task_ending.GRACE_SECONDS", 0.01)

    async def agent(session: sglrl.Session, item: Any) -> float:
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if not stubborn:
                    raise

    run = sglrl.rollout(client, agent, [{"input_ids": [1]}], group_size=1, retries=0, timeout=0.01)
    with pytest.raises(sglrl.SglrlError):
        assert [group async for group in run] == []
    (sample,) = named(spans, "sample")
    assert (sample.attributes or {})["sglrl.sample.end"] == "late"
    assert exceptions(sample) == ["the agent took longer than 0.01 s (timeout)"]
    assert not [record for record in caplog.records if record.name.startswith("opentelemetry")]


async def test_samples_that_the_end_of_the_run_cancels(
    spans: InMemorySpanExporter, client: sglrl.Client
) -> None:
    begun = asyncio.Event()

    async def agent(session: sglrl.Session, item: Any) -> float:
        begun.set()
        await asyncio.Event().wait()
        return 1.0

    async with sglrl.rollout(client, agent, [{"input_ids": [1]}], group_size=1):
        await begun.wait()
    (sample,) = named(spans, "sample")
    assert (sample.attributes or {})["sglrl.sample.end"] == "given up"
    assert (sample.attributes or {})["sglrl.sample.reason"] == "the run has ended"
    assert sample.status.status_code is StatusCode.UNSET


async def test_samples_belong_to_the_span_in_which_the_run_was_started(
    spans: InMemorySpanExporter, provider: TracerProvider, client: sglrl.Client
) -> None:
    """Not to the span of the sample whose end has let them begin."""

    async def agent(session: sglrl.Session, item: Any) -> float:
        await session.generate(max_new_tokens=2)
        return 1.0

    items = [{"input_ids": [i]} for i in range(4)]
    with provider.get_tracer("test").start_as_current_span("step"):
        async with sglrl.rollout(client, agent, items, group_size=1, concurrency=1) as run:
            assert len([group async for group in run]) == 4
    assert tree(spans.get_finished_spans()) == [("step", [("sample", [TURN])] * 4)]


async def test_every_call_has_a_span(spans: InMemorySpanExporter, client: sglrl.Client) -> None:
    await client.generate(input_ids=[1, 2, 3], max_new_tokens=4)
    await client.generate(input_ids=[[1, 2], [1, 2]], max_new_tokens=4, n=2)
    async for _ in client.stream(input_ids=[1, 2, 3], max_new_tokens=5):
        pass
    await client.score([1, 2, 3, 4])
    await client.score([[1, 2]], top_logprobs=2)
    await client.next_token_logprobs([1, 2])
    assert tree(spans.get_finished_spans()) == [CALL] * 9
    calls = [dict(span.attributes or {}) for span in named(spans, "call")]
    usage = "gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens"
    assert [(call["sglrl.endpoint"], *(call[name] for name in usage)) for call in calls] == [
        ("generate", 3, 4),
        *[("generate", 2, 4)] * 4,
        ("generate", 3, 5),
        ("score", 4, 0),
        ("score", 2, 0),
        ("next_token_logprobs", 2, 0),
    ]
    assert calls[0] == {
        "gen_ai.provider.name": "sglrl",
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": client.info.model,
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.response.finish_reasons": ("length",),
        "sglrl.endpoint": "generate",
        "sglrl.attempts": 1,
        "sglrl.resumed": 0,
        "sglrl.version": 0,
        "sglrl.worker": 0,
    }
    events = [[event.name for event in span.events] for span in named(spans, "engine")]
    assert events == [["first token"]] * 6 + [[]] * 3


async def test_calls_that_fail(
    spans: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch, client: sglrl.Client
) -> None:
    submit = client.requests.driver.submit

    def once(call: Call) -> None:
        monkeypatch.setattr(client.requests.driver, "submit", refuse)
        submit(call)

    def refuse(call: Call) -> None:
        raise sglrl.Overloaded("no room")

    monkeypatch.setattr(client.requests.driver, "submit", once)
    with pytest.raises(sglrl.Overloaded):
        await client.generate(input_ids=[1], n=3, max_new_tokens=2)
    # The futures of these calls never get a result. Let their callbacks run.
    await asyncio.sleep(0)
    assert len(named(spans, "call")) == 3
    assert all((span.attributes or {})["sglrl.cancelled"] for span in named(spans, "call"))


async def test_cancelled_and_late_calls(spans: InMemorySpanExporter) -> None:
    slow: Any = {"step_seconds": 0.01, "tokens_per_step": 1, "vocab_size": 512}
    async with sglrl.launch("tiny", engine="fake", **slow) as client:
        generate = functools.partial(client.generate, input_ids=[1], max_new_tokens=400)
        running = asyncio.create_task(generate())
        await until_running(client, 1)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        with pytest.raises(sglrl.DeadlineExceeded):
            await generate(timeout=0.1)
        stream = client.stream(input_ids=[1], max_new_tokens=400)
        async for _ in stream:
            break
        await stream.aclose()
        ended = asyncio.create_task(generate())
        await until_running(client, 1)
    with pytest.raises(sglrl.errors.Closed):
        await ended
    assert tree(spans.get_finished_spans()) == [CALL] * 4
    cancelled, late, left, closed = named(spans, "call")
    for span in (cancelled, left, closed):
        assert (span.attributes or {})["sglrl.cancelled"] is True
        assert span.status.status_code is StatusCode.UNSET
    assert (late.attributes or {})["error.type"] == "DeadlineExceeded"
    assert [event.name for event in named(spans, "engine")[2].events] == ["first token"]


async def test_a_continued_turn_counts_each_token_once(spans: InMemorySpanExporter) -> None:
    slow: Any = {"step_seconds": 0.01, "tokens_per_step": 1, "vocab_size": 512}
    async with sglrl.launch("tiny", engine="fake", **slow) as client:
        session = client.session(input_ids=[1])
        turn = asyncio.create_task(session.generate(max_new_tokens=60))
        await until_running(client, 1)
        await client.abort()
        completion = await turn
    assert len(completion.output_ids) == 60
    assert tree(spans.get_finished_spans()) == [("turn", [CALL, CALL])]
    (sampled,), calls = named(spans, "turn"), named(spans, "call")
    assert (sampled.attributes or {})["sglrl.new_tokens"] == 60
    assert sum((call.attributes or {})["gen_ai.usage.output_tokens"] for call in calls) == 60  # type: ignore[misc]


async def test_an_update_and_its_phases(spans: InMemorySpanExporter, client: sglrl.Client) -> None:
    await client.update_weights({"weight": torch.zeros(2, 2)})
    report = await client.update_weights({"weight": torch.ones(2, 2)})
    with pytest.raises(sglrl.InvalidWeights):
        await client.update_weights({"weight": torch.full((2, 2), torch.nan)})
    first, second, failed = named(spans, "update")
    phases = [(f"update.{name}", []) for name in ("join", "prepare", "stage", "commit")]
    assert tree(spans.get_finished_spans()) == [
        ("update", phases),
        ("update", phases[1:]),
        ("update", []),
    ]
    assert (first.attributes or {})["sglrl.version"] == 1
    attributes = second.attributes or {}
    assert attributes["sglrl.version"] == 2
    assert attributes["sglrl.update.bytes"] == report.bytes == 16
    assert attributes["sglrl.update.mode"] == "full"
    (commit,) = [
        span
        for span in named(spans, "update.commit")
        if span.parent is not None and span.parent.span_id == second.context.span_id
    ]
    took = (commit.end_time or 0) - (commit.start_time or 0)
    assert took == pytest.approx(report.commit_ms * 1e6, abs=2e3)
    assert failed.status.status_code is StatusCode.ERROR
    assert "not finite" in exceptions(failed)[0]
