"""Make the answers of OpenAI's Responses API, as whole answers and as events of streams.

https://platform.openai.com/docs/api-reference/responses/object
https://platform.openai.com/docs/api-reference/responses-streaming
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ..inference.completion import Completion
from .answers import message_of, token_counts, unsent, weight_versions
from .chat import logprobs_of
from .dialect import Message, NewTokens, Part, event
from .errors import HttpError
from .token_answers import reasoning_tokens
from .tool_kinds import Shown, input_of

Item = dict[str, Any]
_PARTS: Final[tuple[Part, ...]] = ("reasoning_content", "content")
_TEXT: Final[dict[Part, str]] = {"reasoning_content": "reasoning", "content": "output"}
"""For each part of a message, the word before "_text" in the names of its events."""
_VALUES: Final = {"function_call": "arguments", "custom_tool_call": "input"}
"""For each type of tool call, the field with the text that the model has written."""


class ResponsesAnswer:
    """Makes the answer to a request of OpenAI's Responses API. See ``Answer``.

    An object makes at most one stream, because it numbers the events.

    Args:
        head: the fields of the answer that are known before the turn is sampled.
        logprobs: whether to add the logprobs of all tokens to the message.
        token_ids: whether to add the token ids of the prompt and of the turn.
        call_ids: a prefix for the ids of tool calls. "": no prefix is needed, because the ids are
            unique within the session.
        shown: the tools of the client, by the name that the model sees.
    """

    def __init__(
        self,
        head: Mapping[str, Any],
        *,
        logprobs: bool,
        token_ids: bool,
        call_ids: str,
        shown: Mapping[str, Shown] | None = None,
    ) -> None:
        self._head = head
        self._logprobs = logprobs
        self._token_ids = token_ids
        self._call_ids = call_ids
        self._shown = shown or {}
        self._ids = str(head["id"]).partition("_")[2]
        """The part of the answer's id that is also in the ids of its items."""
        self._events = 0
        self._items = 0
        """Number of items that were closed."""
        self._open: Part | None = None
        """The part of the message that the open item contains. None: no item is open."""
        self._text = ""
        """The text of the open item so far."""
        self._closed: set[Part] = set()

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """Return an object of type "response"."""
        (completion,) = completions
        return self._whole(completion, self._output(completion))

    # --- events -----------------------------------------------------------------------------------

    def begin(self) -> bytes:
        response = self._response("in_progress", [])
        return b"".join(
            self._event(name, response=response)
            for name in ("response.created", "response.in_progress")
        )

    def text(self, index: int, part: Part, added: str, new: NewTokens = None) -> bytes:
        return self._begin_part(part) + self._delta(part, added)

    def end(self, completions: Sequence[Completion], sent: Sequence[Mapping[Part, str]]) -> bytes:
        (completion,) = completions
        message, output = message_of(completion, self._call_ids), self._output(completion)
        events = []
        for item in output:
            if item["type"] in _VALUES:
                events.append(self._call_events(item))
                continue
            part: Part = "content" if item["type"] == "message" else "reasoning_content"
            if part in self._closed:
                continue
            events.append(self._begin_part(part))
            if rest := unsent(message, part, sent[0]):
                events.append(self._delta(part, rest))
            events.append(self._close(item))
        whole = self._whole(completion, output)
        events.append(self._event(f"response.{whole['status']}", response=whole))
        return b"".join(events)

    def failed(self, error: HttpError) -> bytes:
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        if error.status < 429:
            code = "invalid_prompt"
        failure = {"code": code, "message": str(error)}
        return self._event("response.failed", response=self._response("failed", [], failure))

    def _event(self, name: str, /, **content: Any) -> bytes:
        number = self._events
        self._events += 1
        return event({"type": name, "sequence_number": number, **content}, name)

    def _begin_part(self, part: Part) -> bytes:
        """Begin the item of a part, unless it is open. Close the item that was open before."""
        if part == self._open:
            return b""
        events = self._close(self._text_item(self._open, self._text)) if self._open else b""
        self._open, self._text = part, ""
        item = self._text_item(part, "", "in_progress")
        (content,) = item["content"]
        events += self._event(
            "response.output_item.added",
            output_index=self._items,
            item={**item, "content": []},
        )
        return events + self._event("response.content_part.added", **self._at(item), part=content)

    def _delta(self, part: Part, added: str) -> bytes:
        self._text += added
        at = self._at(self._text_item(part, ""))
        logprobs: dict[str, Any] = {"logprobs": []} if part == "content" else {}
        return self._event(f"response.{_TEXT[part]}_text.delta", **at, delta=added, **logprobs)

    def _close(self, item: Item) -> bytes:
        """End the open item."""
        part, self._open = self._open, None
        assert part is not None
        self._closed.add(part)
        (content,) = item["content"]
        at = self._at(item)
        logprobs = {"logprobs": content["logprobs"]} if part == "content" else {}
        name = f"response.{_TEXT[part]}_text.done"
        events = self._event(name, **at, text=content["text"], **logprobs)
        events += self._event("response.content_part.done", **at, part=content)
        return events + self._item_done(item)

    def _call_events(self, item: Item) -> bytes:
        at = {"item_id": item["id"], "output_index": self._items}
        field = _VALUES[item["type"]]
        begun = {**item, field: "", "status": "in_progress"}
        value, name = item[field], f"response.{item['type']}_{field}"
        events = self._event("response.output_item.added", output_index=self._items, item=begun)
        events += self._event(f"{name}.delta", **at, delta=value)
        named = {"name": item["name"]} if field == "arguments" else {}
        events += self._event(f"{name}.done", **at, **named, **{field: value})
        return events + self._item_done(item)

    def _item_done(self, item: Item) -> bytes:
        self._items += 1
        return self._event("response.output_item.done", output_index=self._items - 1, item=item)

    def _at(self, item: Item) -> dict[str, Any]:
        return {"item_id": item["id"], "output_index": self._items, "content_index": 0}

    # --- parts of answers -------------------------------------------------------------------------

    def _response(self, status: str, output: list[Item], error: Any = None) -> dict[str, Any]:
        return {
            **self._head,
            "status": status,
            "background": False,
            "error": error,
            "incomplete_details": None,
            "max_tool_calls": None,
            "output": output,
            "usage": None,
        }

    def _whole(self, completion: Completion, output: list[Item]) -> dict[str, Any]:
        response = self._response("completed", output)
        if _is_cut(completion):
            response["status"] = "incomplete"
            if completion.finish_reason == "length":
                response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            response["completed_at"] = int(time.time())
        response["usage"] = _usage_of(completion, message_of(completion))
        response["weight_versions"] = weight_versions(completion)
        if self._token_ids:
            response["token_ids"] = completion.output_ids.tolist()
            response["prompt_token_ids"] = completion.prompt_ids.tolist()
        return response

    def _output(self, completion: Completion) -> list[Item]:
        """Return the items of an answer. There is always a message or a tool call."""
        message = message_of(completion, self._call_ids)
        calls, content = message.get("tool_calls") or (), message["content"] or ""
        items = []
        if reasoning := message.get("reasoning_content"):
            items.append(self._text_item("reasoning_content", reasoning))
        if content or not calls:
            status = "incomplete" if _is_cut(completion) and not calls else "completed"
            logprobs = _logprobs_of(completion) if self._logprobs else []
            items.append(self._text_item("content", content, status, logprobs))
        return items + [self._call_item(index, call) for index, call in enumerate(calls)]

    def _call_item(self, index: int, call: Mapping[str, Any]) -> Item:
        """Return the item for a tool call.

        If the arguments of a custom tool are not a single text, the item is the call of a function
        with these arguments.
        """
        called, arguments = call["function"]["name"], call["function"]["arguments"]
        tool = self._shown.get(called) or Shown(called)
        text = input_of(arguments) if tool.custom else None
        kind, short = ("function_call", "fc") if text is None else ("custom_tool_call", "ctc")
        item = {
            "id": f"{short}_{self._ids}_{index}",
            "type": kind,
            "status": "completed",
            "call_id": call["id"],
            "name": tool.name,
        }
        if tool.namespace:
            item["namespace"] = tool.namespace
        return {**item, "arguments": arguments} if text is None else {**item, "input": text}

    def _text_item(
        self, part: Part, text: str, status: str = "completed", logprobs: Sequence[Any] = ()
    ) -> Item:
        if part == "reasoning_content":
            return {
                "id": f"rs_{self._ids}",
                "type": "reasoning",
                "status": status,
                "summary": [],
                "content": [{"type": "reasoning_text", "text": text}],
            }
        content = {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
        return {
            "id": f"msg_{self._ids}",
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": [content],
        }


def _is_cut(completion: Completion) -> bool:
    return completion.finish_reason in ("length", "abort")


def _logprobs_of(completion: Completion) -> list[dict[str, Any]]:
    tokens: list[dict[str, Any]] = logprobs_of(completion)["content"]
    for token in tokens:
        for one in (token, *token["top_logprobs"]):
            # This API does not allow null for the bytes of a token.
            one["bytes"] = one["bytes"] or []
    return tokens


def _usage_of(completion: Completion, message: Message) -> dict[str, Any]:
    prompt, sampled, cached = token_counts([completion])
    reasoning = reasoning_tokens(completion, message)
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": prompt + sampled,
    }
