"""The trace of an HTTP request continues in the gateway."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import sglrl
from sglrl.gateway.local import LocalGateway
from sglrl.gateway.settings import Settings

from .exported import tree, written
from .test_spans import CALL, TURN, named

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}


@pytest.fixture
async def gateway(client: sglrl.Client, provider: TracerProvider) -> AsyncIterator[LocalGateway]:
    # The requests do not belong to the span in which the gateway was started.
    with provider.get_tracer("test").start_as_current_span("a span of the program"):
        async with LocalGateway(client, Settings(names=("tiny",))) as gateway:
            yield gateway


async def post(url: str, headers: dict[str, str], **more: Any) -> None:
    async with httpx.AsyncClient(timeout=300, headers=headers) as http:
        answer = await http.post(f"{url}/v1/chat/completions", json=BODY | more)
        answer.raise_for_status()


@pytest.mark.parametrize("more", [{}, {"stream": True}])
async def test_the_span_of_a_request_is_the_parent(
    spans: InMemorySpanExporter, gateway: LocalGateway, more: dict[str, Any]
) -> None:
    headers = {"TraceParent": f"00-{TRACE}-{SPAN}-01", "tracestate": "vendor=value"}
    await post(gateway.url, headers, **more)
    assert tree(spans.get_finished_spans()) == [TURN]
    (turn,) = named(spans, "turn")
    assert turn.parent is not None
    assert (turn.parent.trace_id, turn.parent.span_id) == (int(TRACE, 16), int(SPAN, 16))
    assert turn.parent.trace_state["vendor"] == "value"


@pytest.mark.parametrize("header", [{}, {"traceparent": "nonsense"}])
async def test_a_request_without_a_trace(
    spans: InMemorySpanExporter, gateway: LocalGateway, header: dict[str, str]
) -> None:
    await post(gateway.url, header)
    assert [turn.parent for turn in named(spans, "turn")] == [None]


async def test_a_session_belongs_to_the_request_that_opens_it(
    spans: InMemorySpanExporter, gateway: LocalGateway
) -> None:
    headers = {"traceparent": f"00-{TRACE}-{SPAN}-01"}
    async with httpx.AsyncClient(timeout=300, headers=headers) as http:
        opened = (await http.post(f"{gateway.url}/sessions")).json()
    await post(opened["base_url"].removesuffix("/v1"), {"x-api-key": opened["api_key"]})
    (turn,) = named(spans, "turn")
    assert turn.parent is not None
    assert (turn.parent.trace_id, turn.parent.span_id) == (int(TRACE, 16), int(SPAN, 16))


async def test_a_request_whose_trace_is_not_sampled(
    spans: InMemorySpanExporter, gateway: LocalGateway
) -> None:
    await post(gateway.url, {"traceparent": f"00-{TRACE}-{SPAN}-00"})
    assert spans.get_finished_spans() == ()


@pytest.mark.parametrize("own", [True, False])
async def test_requests_of_an_agent_belong_to_its_sample(
    spans: InMemorySpanExporter, provider: TracerProvider, client: sglrl.Client, own: bool
) -> None:
    """Without a header to the sample itself, and with the headers to the current span."""

    async def ask(session: sglrl.Session, headers: dict[str, str]) -> None:
        async with openai.AsyncOpenAI(
            base_url=session.base_url, api_key=session.api_key, default_headers=headers
        ) as api:
            await api.chat.completions.create(**BODY)  # type: ignore[call-overload]

    async def agent(session: sglrl.Session, item: Any) -> float:
        if not own:
            await ask(session, {})
            return 1.0
        with provider.get_tracer("test").start_as_current_span("step"):
            headers = session.headers
            assert set(headers) == {"traceparent"}
            await ask(session, headers)
        return 1.0

    async with sglrl.rollout(client, agent, [0], group_size=1, gateway=True) as run:
        assert len([group async for group in run]) == 1
    turns = [("turn", [CALL])]
    wanted = [("step", turns)] if own else turns
    assert tree(spans.get_finished_spans()) == [("sample", wanted)]


async def test_a_session_has_no_headers_without_tracing(client: sglrl.Client) -> None:
    async with client.session(input_ids=[1]) as session:
        assert session.headers == {}


def test_the_processes_of_a_gateway(tmp_path: Path) -> None:
    """``$SGLRL_TRACES`` sets their provider, because they run no code of the program."""
    path = tmp_path / "spans"
    tests = Path(__file__).parents[1]
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tests), os.environ.get("PYTHONPATH", "")]),
        "SGLRL_TRACES": "traces.exported:write_to_file_of_variable",
        "SPANS": str(path),
    }
    program = [sys.executable, tests / "traces/serve_program.py", f"00-{TRACE}-{SPAN}-01"]
    done = subprocess.run(program, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    made = written(path)
    (opened,) = [span["context"] for span in made if span["name"] == "actor.open_session"]
    turns = [span for span in made if span["name"] == "turn"]
    # The second turn belongs to the span in which its session was opened.
    assert [(turn["context"]["trace_id"], turn["parent_id"]) for turn in turns] == [
        (f"0x{TRACE}", f"0x{SPAN}"),
        (opened["trace_id"], opened["span_id"]),
    ]
