"""Answers of Anthropic's Messages API, without a server: its client sends them back."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import anthropic
import httpx2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglrl.gateway.answers import message_of
from sglrl.gateway.anthropic import MessagesRequest, anthropic_error, parse
from sglrl.gateway.conversations import Digest
from sglrl.gateway.dialect import encode
from sglrl.gateway.errors import HttpError
from sglrl.inference.completion import Completion
from sglrl.inference.message import AssistantMessage, ToolCall
from sglrl.inference.sampling import SamplingParams
from sglrl.wire.engine import TokenChunk

from .test_anthropic import ASK, CALL, JSON


def completion_of(
    message: AssistantMessage,
    *,
    tokens: int = 2,
    finish: str = "stop",
    match: str | int | None = None,
    cached: int = 0,
) -> Completion:
    chunk = TokenChunk(
        ids=np.arange(tokens, dtype="<i4").tobytes(),
        logprobs=b"",
        version=3,
        finish=finish,
        stop_match=match,
        cached_tokens=cached,
    )
    times: Any = dict.fromkeys(("submitted_at", "sent_at", "first_at", "finished_at"), 0.0)
    made = Completion(
        worker=0,
        resumed=0,
        prompt=np.arange(5, dtype="<i4").tobytes(),
        chunks=[chunk],
        wants_logprobs=False,
        top_count=0,
        decode=lambda ids, skip: "",
        params=SamplingParams(),
        **times,
    )
    made.__dict__["message"] = message
    return made


def answered(completion: Completion, **fields: Any) -> Any:
    request = parse(json.dumps({"messages": [ASK], **fields}).encode())
    body = encode(request.answer("m", "").whole([completion]))
    return json.loads(body, parse_constant=pytest.fail)


@pytest.mark.parametrize(
    ("values", "limit", "reason", "sequence"),
    [
        ({"finish": "stop"}, 9, "end_turn", None),
        ({"finish": "stop", "match": 7}, 9, "end_turn", None),
        ({"finish": "stop", "match": "END"}, 9, "stop_sequence", "END"),
        ({"finish": "length", "tokens": 9}, 9, "max_tokens", None),
        ({"finish": "length", "tokens": 8}, 9, "model_context_window_exceeded", None),
        ({"finish": "length", "tokens": 8}, None, "model_context_window_exceeded", None),
    ],
)
def test_why_an_answer_ends(values: Any, limit: int | None, reason: str, sequence: Any) -> None:
    said = AssistantMessage(content="Well. END")
    made = answered(completion_of(said, **values), max_tokens=limit)
    assert (made["stop_reason"], made["stop_sequence"]) == (reason, sequence)
    text = "Well. " if sequence else "Well. END"
    assert made["content"] == [{"type": "text", "text": text}]
    call = ToolCall(id="call_0_0", name="add", arguments={}, raw="")
    made = answered(completion_of(AssistantMessage(content="", tool_calls=(call,)), **values))
    assert (made["stop_reason"], made["stop_sequence"]) == ("tool_use", None)
    assert made["content"] == [{**CALL, "input": {}}]


@pytest.mark.parametrize("values", [{"finish": "length", "tokens": 9}, {"finish": "abort"}])
def test_a_call_that_is_cut(values: Any) -> None:
    """The first call is whole, but the turn has more that is lost."""
    whole = ToolCall(id="call_0_0", name="add", arguments={}, raw="")
    cut = ToolCall(id="call_0_1", name="", arguments=None, raw="{", error="it has no end")
    said = AssistantMessage(content="", tool_calls=(whole, cut))
    made = answered(completion_of(said, **values), max_tokens=9)
    assert made["stop_reason"] == ("max_tokens" if values["finish"] == "length" else "pause_turn")
    assert made["content"][-1] == {**CALL, "input": {}}


def test_tokens_are_counted_as_anthropic_does() -> None:
    made = answered(completion_of(AssistantMessage(content=""), cached=3), return_token_ids=True)
    assert made["usage"] == {
        "input_tokens": 2,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 3,
        "output_tokens": 2,
    }
    assert made["weight_versions"] == [{"version": 3, "start": 0, "end": 2}]
    assert (made["prompt_token_ids"], made["token_ids"]) == ([0, 1, 2, 3, 4], [0, 1])
    # Agents read the first block.
    assert made["content"] == [{"type": "text", "text": ""}]


def test_arguments_that_are_not_in_the_standard_of_json() -> None:
    """Numbers that are not finite, or too long, and half of a character."""
    arguments = json.loads('{"a": [NaN, -Infinity, 1e999], "b": 1e9, "c": "\\ud800"}')
    call = ToolCall(id="x", name="add", arguments={**arguments, "d": 10**40}, raw="")
    completion = completion_of(AssistantMessage(content="\n", tool_calls=(call,)))
    expected = {"a": [None] * 3, "b": 1e9, "c": "\ud800", "d": 10**40}
    made = answered(completion)
    assert made["content"] == [{**CALL, "id": "x", "input": expected}]
    request = parse(json.dumps({"messages": [ASK]}).encode())
    events = request.answer("m", "").end([completion], [{}]).decode()
    (delta,) = [line for line in events.split("\n") if '"partial_json"' in line]
    written = json.loads(delta.removeprefix("data: "))["delta"]["partial_json"]
    assert json.loads(written, parse_constant=pytest.fail) == expected


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (404, "not_found_error"),
        (408, "invalid_request_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (503, "overloaded_error"),
        (504, "timeout_error"),
    ],
)
def test_types_of_errors(status: int, kind: str) -> None:
    made = anthropic_error(HttpError(status, "No."))
    assert made == {"type": "error", "error": {"type": kind, "message": "No."}}


class Peer:
    """Answers requests of Anthropic's client without a network.

    Attributes:
        bodies: of the requests.
    """

    def __init__(self, answer: Callable[[MessagesRequest], bytes]) -> None:
        self.bodies: list[bytes] = []
        self._answer = answer
        transport = httpx2.MockTransport(self._handle)
        self.client = anthropic.Anthropic(
            api_key="x", http_client=httpx2.Client(transport=transport), max_retries=0
        )

    def _handle(self, request: httpx2.Request) -> httpx2.Response:
        self.bodies.append(request.content)
        body = parse(request.content)
        kind = "text/event-stream" if body.stream else "application/json"
        return httpx2.Response(200, headers={"content-type": kind}, content=self._answer(body))


def pieces_of(text: str, chance: Any) -> list[str]:
    """Cut a text into pieces."""
    pieces = []
    while text:
        size = chance.randint(1, len(text))
        pieces.append(text[:size])
        text = text[size:]
    return pieces


def streamed(body: MessagesRequest, completion: Completion, chance: Any) -> bytes:
    """Return a stream that a random part of the text arrives in before the end."""
    answer = body.answer("m", "")
    events, sent = answer.begin(), {}
    message = message_of(completion)
    for part in ("reasoning_content", "content"):
        text = (message.get(part) or "").strip()
        if chance.random() < 0.3:
            text = text[: chance.randint(0, len(text))].rstrip()
        for piece in pieces_of(text, chance):
            events += answer.text(0, part, piece)
        if text:
            sent[part] = text
        if text != (message.get(part) or "").strip():
            break
    return events + answer.end([completion], [sent])


def check_events(events: list[Any]) -> None:
    """Check the order of the events of a stream."""
    kinds = [event.type for event in events]
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
    running, blocks = None, 0
    for event in events[1:-2]:
        if event.type == "content_block_start":
            assert running is None
            assert event.index == blocks
            running, blocks = event.index, blocks + 1
            kind = event.content_block.type
        else:
            assert event.index == running
            if event.type == "content_block_stop":
                running = None
            else:
                assert event.type == "content_block_delta"
                expected = {
                    "text": ["text_delta"],
                    "thinking": ["thinking_delta", "signature_delta"],
                    "tool_use": ["input_json_delta"],
                }
                assert event.delta.type in expected[kind]
    assert running is None


CALLS = st.lists(
    st.builds(
        ToolCall,
        id=st.text(min_size=1),
        name=st.text(min_size=1),
        arguments=st.dictionaries(st.text(), JSON, max_size=3),
        raw=st.just(""),
    ),
    max_size=3,
)
TEXT = st.text() | st.text().map("{}\n".format)
ANSWERS = st.builds(
    AssistantMessage,
    content=TEXT,
    reasoning_content=st.none() | TEXT,
    tool_calls=CALLS.map(tuple),
)


@given(ANSWERS, st.randoms(use_true_random=False), st.booleans())
def test_an_answer_that_comes_back(said: AssistantMessage, chance: Any, stream: bool) -> None:
    """The client understands any answer, and sends it back as the same answer."""
    completion = completion_of(said)

    def answer(body: MessagesRequest) -> bytes:
        if body.stream:
            return streamed(body, completion, chance)
        return encode(body.answer("m", "").whole([completion]))

    peer = Peer(answer)
    values: Any = {"model": "m", "max_tokens": 9}
    if stream:
        with peer.client.messages.create(messages=[ASK], stream=True, **values) as raw:
            check_events(list(raw))
        with peer.client.messages.stream(messages=[ASK], **values) as events:
            made: Any = events.get_final_message()
    else:
        made = peer.client.messages.create(messages=[ASK], **values)
    kinds = ["thinking"] if (said.reasoning_content or "").strip() else []
    # Agents read the first block, so there is one.
    if said.content.strip() or not (kinds or said.tool_calls):
        kinds.append("text")
    assert [block.type for block in made.content] == kinds + ["tool_use"] * len(said.tool_calls)
    assert made.usage.output_tokens == 2
    assert made.usage.input_tokens == 5
    thoughts = "".join(block.thinking for block in made.content if block.type == "thinking")
    assert thoughts.strip() == (said.reasoning_content or "").strip()
    assert all(block.signature for block in made.content if block.type == "thinking")
    back = {"role": "assistant", "content": made.content}
    peer.client.messages.create(messages=[ASK, back, ASK], **values)
    (again,) = parse(peer.bodies[-1]).turns()
    assert again.messages is not None
    ours = [ASK, message_of(completion)]
    assert Digest(again.messages, {}).beginnings[:-1] == Digest(ours, {}).beginnings
