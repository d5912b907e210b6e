"""The requests and answers of three APIs of the gateway, as a client sees them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

Fields = Mapping[str, Any]


class Ask(NamedTuple):
    """One request of a conversation.

    Attributes:
        messages: the whole conversation, with the roles "user" and "assistant".
        tokens: number of tokens to sample.
        stream: the answer is a stream.
        previous: id of the response before the last message. "": all messages are sent.
    """

    messages: Sequence[Fields]
    tokens: int
    stream: bool
    previous: str = ""


class Answer(NamedTuple):
    """What a client received for one request.

    Attributes:
        text: of a stream: the joined texts of its events.
        tokens: ids of the sampled tokens.
        versions: the policy version of each token.
        id: of the answer.
    """

    text: str
    tokens: list[int]
    versions: list[int]
    id: str


class Dialect(NamedTuple):
    """One API.

    Attributes:
        path: below the ``base_url`` of a session.
        body: makes the body of a request.
        whole: returns the text of a whole answer, and the fields with its tokens.
        delta: returns the text that an event of a stream adds.
        last: returns the fields with the tokens, if the event has them.
        end: is in the last line of a stream.
    """

    path: str
    body: Callable[[Ask], dict[str, Any]]
    whole: Callable[[Fields], tuple[str, Fields]]
    delta: Callable[[Fields], str]
    last: Callable[[Fields], Fields | None]
    end: str


def _chat_body(ask: Ask) -> dict[str, Any]:
    return {"messages": ask.messages, "max_tokens": ask.tokens}


def _chat_whole(answer: Fields) -> tuple[str, Fields]:
    (choice,) = answer["choices"]
    return choice["message"]["content"], choice


def _chat_delta(event: Fields) -> str:
    return "".join(choice["delta"].get("content", "") for choice in event["choices"])


def _chat_last(event: Fields) -> Fields | None:
    (choice,) = event["choices"]
    return choice if choice["finish_reason"] else None


def _anthropic_whole(answer: Fields) -> tuple[str, Fields]:
    (block,) = answer["content"]
    return block["text"], answer


def _anthropic_delta(event: Fields) -> str:
    return str(event["delta"]["text"]) if event["type"] == "content_block_delta" else ""


def _anthropic_last(event: Fields) -> Fields | None:
    return event["delta"] if event["type"] == "message_delta" else None


def _responses_body(ask: Ask) -> dict[str, Any]:
    given: dict[str, Any] = {"input": ask.messages, "max_output_tokens": ask.tokens}
    if ask.previous:
        given |= {"input": ask.messages[-1:], "previous_response_id": ask.previous}
    return given


def _responses_whole(answer: Fields) -> tuple[str, Fields]:
    (item,) = answer["output"]
    (content,) = item["content"]
    return content["text"], answer


def _responses_delta(event: Fields) -> str:
    return str(event["delta"]) if event["type"] == "response.output_text.delta" else ""


def _responses_last(event: Fields) -> Fields | None:
    # Each turn has as many tokens as it may have.
    return event["response"] if event["type"] == "response.incomplete" else None


DIALECTS = {
    "chat": Dialect(
        "/chat/completions", _chat_body, _chat_whole, _chat_delta, _chat_last, "data: [DONE]"
    ),
    "anthropic": Dialect(
        "/messages", _chat_body, _anthropic_whole, _anthropic_delta, _anthropic_last,
        '"type":"message_stop"',
    ),
    "responses": Dialect(
        "/responses", _responses_body, _responses_whole, _responses_delta, _responses_last,
        '"type":"response.incomplete"',
    ),
}  # fmt: skip


class Reading:
    """A stream of events, line by line.

    Attributes:
        text: that has arrived.
        ended: the last event has arrived.
    """

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        self._id = ""
        self._last: Fields | None = None
        self.text = ""
        self.ended = False

    def add(self, line: str) -> None:
        """Add a line. An event that states an error raises ``AssertionError``."""
        self.ended = self.ended or self._dialect.end in line
        name, _, data = line.partition(": ")
        if name != "data" or data == "[DONE]":
            return
        event = json.loads(data)
        assert not event.get("error"), event
        assert event.get("type") not in ("error", "response.failed"), event
        self.text += self._dialect.delta(event)
        self._id = self._id or id_of(event)
        self._last = self._dialect.last(event) or self._last

    def answer(self) -> Answer:
        """Return the answer of a stream that has ended."""
        assert self.ended, f"a stream broke off after {self.text!r}"
        assert self._last is not None
        return answer_of(self.text, self._last, self._id)


def id_of(event: Fields) -> str:
    inner = event.get("response") or event.get("message") or event
    return str(inner.get("id", ""))


def whole_answer(dialect: Dialect, answer: Fields) -> Answer:
    """Return the answer of JSON."""
    text, fields = dialect.whole(answer)
    return answer_of(text, fields, id_of(answer))


def answer_of(text: str, fields: Fields, id_: str) -> Answer:
    """Return an answer. Check that its spans are contiguous."""
    versions: list[int] = []
    for span in fields["weight_versions"]:
        assert span["start"] == len(versions), fields
        assert span["end"] > span["start"], fields
        versions += [span["version"]] * (span["end"] - span["start"])
    tokens = fields["token_ids"]
    assert len(versions) == len(tokens), fields
    return Answer(text, tokens, versions, id_)
