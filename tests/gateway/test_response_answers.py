"""Answers of OpenAI's Responses API, whole and as events, read by OpenAI's client."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, zip_longest
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from core.byte_decoder import decode_bytes
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response

from sglrl.gateway.answers import message_of
from sglrl.gateway.conversations import Digest
from sglrl.gateway.dialect import Message, Part, TurnRequest
from sglrl.gateway.errors import HttpError
from sglrl.gateway.responses import parse
from sglrl.gateway.token_answers import tokens_until
from sglrl.inference.completion import Completion
from sglrl.inference.message import AssistantMessage, ToolCall
from sglrl.inference.sampling import SamplingParams
from sglrl.wire.engine import TokenChunk

ASK = {"role": "user", "content": "Hi"}
TOOL = {
    "type": "function",
    "name": "add",
    "description": "Add.",
    "parameters": {"type": "object"},
    "strict": True,
}
PARTS: tuple[Part, ...] = ("reasoning_content", "content")
LOGPROBS = "message.output_text.logprobs"


def completed(message: AssistantMessage, finish: str = "stop") -> Completion:
    """Return a completion that a renderer parses as this message. Each byte is a token."""
    thought = message.reasoning_content
    text = ("" if thought is None else f"<think>\n{thought}\n</think>\n\n") + message.content
    ids = list((text + "".join(made.raw for made in message.tool_calls)).encode()) or [0]
    logprobs = np.full(len(ids), -0.5, "<f4").tobytes()
    chunk = TokenChunk(np.array(ids, "<i4").tobytes(), logprobs, finish, 2, version=3)
    prompt = np.array([1, 2, 3], "<i4").tobytes()
    values: Any = (0, 0, prompt, [chunk], True, 0, 1.0, 1.0, 1.0, 2.0, decode_bytes)
    made = Completion(*values, SamplingParams())
    made.__dict__["message"] = message
    return made


TEXT = st.text(st.characters(codec="utf-8"), max_size=12)
ARGUMENTS = st.dictionaries(
    TEXT, TEXT | st.integers() | st.lists(st.none(), max_size=2), max_size=2
)
CALLS = st.lists(ARGUMENTS, max_size=3)


@st.composite
def said_by_models(draw: st.DrawFn) -> AssistantMessage:
    number = draw(st.integers(0, 99))
    calls = [
        ToolCall(id=f"call_{number}_{at}", name="add", arguments=arguments, raw=f"[{at}]")
        for at, arguments in enumerate(draw(CALLS))
    ]
    return AssistantMessage(
        content=draw(TEXT),
        reasoning_content=draw(st.none() | TEXT),
        tool_calls=tuple(calls),
    )


class Engine:
    """Answers the client's requests with given messages, as the gateway does."""

    def __init__(self, said: Sequence[AssistantMessage], finish: str = "stop") -> None:
        self.completions = [completed(message, finish) for message in said]
        self.turns: list[TurnRequest] = []
        self.events: list[dict[str, Any]] = []

    def respond(self, request: httpx.Request) -> httpx.Response:
        body = parse(request.content)
        completion = self.completions[len(self.turns)]
        (turn,) = body.turns()
        self.turns.append(turn)
        answer = body.answer(body.model, "")
        if not turn.stream:
            return httpx.Response(200, json=json.loads(json.dumps(answer.whole([completion]))))
        found = [answer.begin()]
        sent: dict[Part, str] = {}
        message = message_of(completion)
        # White space at the ends is sent last, and of the last part not everything is sent before.
        texts = {part: (message.get(part) or "").strip() for part in PARTS}
        for part, text in texts.items():
            shown = text[:9] if part == "content" or not texts["content"] else text
            for at in range(0, len(shown), 4):
                sent[part] = shown[: at + 4]
                found.append(answer.text(0, part, shown[at : at + 4]))
        stream = b"".join([*found, answer.end([completion], [sent])])
        self.events = [
            json.loads(line[6:]) for line in stream.decode().split("\n") if line[:5] == "data:"
        ]
        return httpx.Response(200, content=stream, headers={"content-type": "text/event-stream"})

    @contextlib.contextmanager
    def client(self) -> Iterator[openai.OpenAI]:
        transport = httpx.MockTransport(self.respond)
        with httpx.Client(transport=transport) as http:
            yield openai.OpenAI(base_url="http://x/v1", api_key="x", http_client=http)


@given(st.lists(said_by_models(), min_size=1, max_size=3), st.booleans())
def test_what_a_client_returns_is_recognized(said: list[AssistantMessage], asks: bool) -> None:
    """The conversation with the answers as items is that with the answers as messages."""
    engine = Engine([*said, AssistantMessage(content="")])
    items: list[Any] = [ASK]
    messages: list[Message] = [ASK]
    with engine.client() as client:
        for completion, after in zip_longest(engine.completions, said[1:]):
            response = client.responses.create(model="m", input=items)
            assert (
                Digest(engine.turns[-1].messages or (), {}).beginnings
                == Digest(messages, {}).beginnings
            )
            items += response.output
            messages.append(message_of(completion))
            for made in completion.tool_calls:
                items.append({"type": "function_call_output", "call_id": made.id, "output": "5"})
                messages.append({"role": "tool", "tool_call_id": made.id, "content": "5"})
            # Nothing else divides two answers without reasoning.
            if asks or not (after and after.reasoning_content):
                items.append(ASK)
                messages.append(ASK)


@given(said_by_models(), st.sampled_from(["stop", "length"]))
def test_a_stream_is_the_whole_answer_in_pieces(said: AssistantMessage, finish: str) -> None:
    engine = Engine([said, said], finish)
    values: Any = {"model": "m", "input": "Hi", "include": [LOGPROBS]}
    with engine.client() as client:
        whole = client.responses.create(**values)
        with client.responses.create(stream=True, **values) as stream:
            last: Any = list(stream)[-1]
    status = "completed" if finish == "stop" else "incomplete"
    assert last.type == f"response.{status}"
    known = {"id", "created_at", "completed_at", "output"}
    assert last.response.model_dump(exclude=known) == whole.model_dump(exclude=known)
    assert [_unnamed(item) for item in last.response.output] == [
        _unnamed(item) for item in whole.output
    ]
    _check(engine.events)


def _unnamed(item: Any) -> dict[str, Any]:
    found: dict[str, Any] = item.model_dump(exclude={"id"})
    return found


def _check(events: Sequence[Mapping[str, Any]]) -> None:
    """Check the order of events, and that deltas, ends and the last event agree."""
    assert [one["sequence_number"] for one in events] == list(range(len(events)))
    assert [one["type"] for one in events[:2]] == ["response.created", "response.in_progress"]
    left = list(events[2:-1])
    for index, final in enumerate(events[-1]["response"]["output"]):
        own = [one for one in left if one["output_index"] == index]
        assert left[: len(own)] == own
        del left[: len(own)]
        kinds = [one["type"].removeprefix("response.") for one in own]
        assert [kind for kind, _ in groupby(kinds) if ".delta" not in kind] == _ORDER[final["type"]]
        assert {one.get("item_id", final["id"]) for one in own} == {final["id"]}
        deltas = [one["delta"] for one in own if "delta" in one]
        done = own[-1]["item"]
        (text,) = [done["arguments"]] if "arguments" in done else [done["content"][0]["text"]]
        assert "".join(deltas) in (text, text.lstrip())
        if "content_part.done" in kinds:
            assert own[-2]["part"] == done["content"][0]
            assert own[-3]["text"] == text
        if done != final:
            # The part has ended before the turn, and lacks the white space around it.
            assert text == final["content"][0].pop("text").strip()
            assert done["content"][0].pop("text") == text
            assert done == final
    assert left == []


_TEXT = ["output_item.added", "content_part.added", "", "content_part.done", "output_item.done"]
_ORDER = {
    "message": [kind or "output_text.done" for kind in _TEXT],
    "reasoning": [kind or "reasoning_text.done" for kind in _TEXT],
    "function_call": [_TEXT[0], "function_call_arguments.done", _TEXT[-1]],
}
"""The events of an item, without those of new text."""


def test_an_answer() -> None:
    calls = (ToolCall(id="call_0_0", name="add", arguments={"a": 1}, raw="[0]"),)
    said = AssistantMessage(content="Yes.", reasoning_content="Hm.", tool_calls=calls)
    fields = {
        "model": "m", "input": "Hi", "tools": [TOOL], "metadata": {"a": "b"}, "instructions": "X",
        "return_token_ids": True, "include": [LOGPROBS], "max_output_tokens": 99,
    }  # fmt: skip
    body = parse(json.dumps(fields).encode())
    whole = body.answer("m", "call_x_").whole([completed(said)])
    Response.model_validate(whole)
    reasoning, message, made = whole["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert reasoning["summary"] == []
    (part,) = message["content"]
    assert (part["text"], part["annotations"]) == ("Yes.", [])
    assert [one["token"] for one in part["logprobs"]] == list("<think>\nHm.\n</think>\n\nYes.[0]")
    assert {one["logprob"] for one in part["logprobs"]} == {-0.5}
    assert (made["call_id"], made["arguments"]) == ("call_x_call_0_0", '{"a": 1}')
    assert whole["status"] == "completed"
    assert whole["usage"] == {
        "input_tokens": 3,
        "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
        "output_tokens": 29,
        "output_tokens_details": {"reasoning_tokens": len("<think>\nHm.")},
        "total_tokens": 32,
    }
    assert whole["weight_versions"] == [{"version": 3, "start": 0, "end": 29}]
    assert (whole["prompt_token_ids"], len(whole["token_ids"])) == ([1, 2, 3], 29)
    assert (whole["metadata"], whole["instructions"]) == ({"a": "b"}, "X")
    assert (whole["tools"], whole["max_output_tokens"]) == ([TOOL], 99)


PATCH = {"type": "custom", "name": "patch"}
AGENTS = {"type": "namespace", "name": "agents", "description": "", "tools": [TOOL, PATCH]}


@pytest.mark.parametrize("streamed", [False, True])
def test_calls_have_the_form_of_their_tools(streamed: bool) -> None:
    """What a client sends back is recognized, and so is a call of a custom tool without a text."""
    made: list[tuple[str, dict[str, Any]]] = [
        ("patch", {"input": "a\né"}),
        ("patch", {"text": "a"}),
        ("agents__add", {"a": 1}),
        ("agents__patch", {"input": ""}),
        ("unknown", {}),
    ]
    calls = [
        ToolCall(id=f"call_{at}", name=name, arguments=arguments, raw="")
        for at, (name, arguments) in enumerate(made)
    ]
    done = completed(AssistantMessage(content="", tool_calls=tuple(calls)))
    body = parse(json.dumps({"input": "Hi", "tools": [PATCH, AGENTS], "model": "m"}).encode())
    answer = body.answer("m", "")
    if streamed:
        answer.begin()
        events = [
            json.loads(part.partition("data: ")[2])
            for part in answer.end([done], [{}]).decode().split("\n\n")
            if part
        ]
        output = [one["item"] for one in events if one["type"] == "response.output_item.done"]
        assert output == events[-1]["response"]["output"]
        inputs = [one["input"] for one in events if one["type"].endswith("tool_call_input.done")]
        assert inputs == ["a\né", ""]
    else:
        output = answer.whole([done])["output"]
    # Older versions of the library do not know namespaces of tools.
    Response.model_validate({**answer.whole([done]), "output": output, "tools": []})
    kinds = [(one["type"], one.get("namespace", ""), one["name"]) for one in output]
    assert kinds == [
        ("custom_tool_call", "", "patch"),
        ("function_call", "", "patch"),
        ("function_call", "agents", "add"),
        ("custom_tool_call", "agents", "patch"),
        ("function_call", "", "unknown"),
    ]
    results = [
        {"type": f"{one['type']}_output", "call_id": one["call_id"], "output": "ok"}
        for one in output
    ]
    (request,) = parse(json.dumps({"input": [ASK, *output, *results]}).encode()).turns()
    assert request.messages is not None
    returned = Digest(request.messages, {})
    assert returned.beginnings[1] == Digest([ASK], {}).with_answer(message_of(done))


def test_a_stream_that_fails() -> None:
    answer = parse(b'{"input": "Hi"}').answer("m", "")
    answer.begin()
    for status, code in (
        (503, "server_error"),
        (429, "rate_limit_exceeded"),
        (400, "invalid_prompt"),
    ):
        name, data = answer.failed(HttpError(status, "Sorry.")).decode().strip().split("\n")
        assert name == "event: response.failed"
        response = json.loads(data.removeprefix("data: "))["response"]
        assert response["error"] == {"code": code, "message": "Sorry."}
        assert response["status"] == "failed"


@given(TEXT, st.text(st.sampled_from("aé🙂"), min_size=40, max_size=99), TEXT)
def test_tokens_until_the_end_of_a_text(before: str, text: str, after: str) -> None:
    completion = completed(AssistantMessage(content=before + text + after))
    whole = before + text + after
    end = whole.find(text) + len(text)
    assert tokens_until(completion, text) == len(whole[:end].encode())
    assert tokens_until(completion, "") == 0
    assert tokens_until(completion, f"{text}\x00\x01") == 0
