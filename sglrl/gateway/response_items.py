"""The input of OpenAI's Responses API as messages and tools of chat completions.

https://platform.openai.com/docs/api-reference/responses/create
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from ..errors import InvalidRequest
from .dialect import Message

_ROLES: Final = {
    "user": "user",
    "system": "system",
    "developer": "system",
    "assistant": "assistant",
}
"""Roles of the Responses API, and those that chat templates know."""
_TEXTS: Final = {"input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Types of content that are text, and the field that has it."""
_ORDER: Final = ("reasoning_content", "content", "tool_calls")
"""The parts of an assistant's message in the order in which an answer has them as items."""


def messages_of(given: str | Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return the messages of an input.

    An answer consists of items: reasoning, a message and calls, in this order. They become one
    message, as ``message_of`` returns it. An item that comes earlier in this order than the item
    before it begins another answer.

    Raises:
        InvalidRequest: an item is wrong, or its type is not supported. The error states its
            position.
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}] if given else []
    found: list[Message] = []
    last = ""
    """The part of an answer that the item before is; "": it is none."""
    for at, item in enumerate(given):
        name = f"input[{at}]"
        role, part, value = _read(item, name)
        if role != "assistant":
            found.append({"role": role, **value})
            last = ""
            continue
        if part == "reasoning_content" and not value:
            # A client has removed the text of the reasoning. An answer begins nevertheless.
            last = ""
            continue
        goes_on = last and (part == last == "tool_calls" or _ORDER.index(part) > _ORDER.index(last))
        if not goes_on:
            found.append({"role": "assistant", "content": ""})
        if part == "tool_calls":
            found[-1].setdefault(part, []).append(value)
        else:
            found[-1][part] = value
        last = part
    return found


def _read(item: Mapping[str, Any], name: str) -> tuple[str, str, Any]:
    """Return the role of an item; the part of an answer that it is, or ""; and its value."""
    kind = item.get("type")
    if kind is None and ("role" in item or "id" in item):
        kind = "message" if "role" in item else "item_reference"
    if kind == "message":
        role = _ROLES.get(str(item.get("role")))
        if role is None:
            known = ", ".join(map(repr, _ROLES))
            raise InvalidRequest(
                f"{name}.role must be one of {known}, got {item.get('role')!r:.99}"
            )
        text = _text_of(item.get("content"), f"{name}.content")
        if role == "assistant":
            return role, "content", text
        return role, "", {"content": text}
    if kind == "function_call":
        function = {key: _string(item, key, name) for key in ("name", "arguments")}
        call = {"id": _string(item, "call_id", name), "type": "function", "function": function}
        return "assistant", "tool_calls", call
    if kind == "function_call_output":
        text = _text_of(item.get("output"), f"{name}.output")
        return "tool", "", {"tool_call_id": _string(item, "call_id", name), "content": text}
    if kind == "reasoning":
        return "assistant", "reasoning_content", _reasoning_of(item.get("content"), name)
    if kind == "item_reference":
        raise InvalidRequest(f"{name} refers to an item, which is not supported: send the item")
    raise InvalidRequest(f"{name} is of type {kind!r:.99}, which is not supported")


def _text_of(content: Any, name: str) -> str:
    """Return text, or the joined texts of a list of parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{name} must be text or a list of parts, got {content!r:.99}")
    texts = []
    for at, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        key = _TEXTS.get(str(kind))
        if key is None:
            known = ", ".join(map(repr, _TEXTS))
            raise InvalidRequest(
                f"{name}[{at}] is of type {kind!r:.99}, and only text is supported: {known}"
            )
        texts.append(_string(part, key, f"{name}[{at}]"))
    return "".join(texts)


def _reasoning_of(content: Any, name: str) -> str:
    """Return the text of reasoning. Summaries and encrypted texts are not part of a prompt."""
    if not isinstance(content, list):
        return ""
    parts = [part for part in content if isinstance(part, Mapping)]
    return "".join(
        _string(part, "text", f"{name}.content")
        for part in parts
        if part.get("type") == "reasoning_text"
    )


def _string(item: Mapping[str, Any], key: str, name: str) -> str:
    value = item.get(key)
    if not isinstance(value, str):
        raise InvalidRequest(f"{name}.{key} must be a string, got {value!r:.99}")
    return value


# --- tools ----------------------------------------------------------------------------------------


def tools_of(given: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    """Return the schemas of tools as chat templates know them.

    Raises:
        InvalidRequest: a tool is no function, or has a field that is not supported.
    """
    found = []
    for at, tool in enumerate(given or ()):
        name = f"tools[{at}]"
        if tool.get("type") != "function":
            raise InvalidRequest(
                f"{name} is of type {tool.get('type')!r:.99}, and only functions are supported"
            )
        check_fields(tool, ("type", "name", "description", "parameters", "strict"), name)
        function = {"name": _string(tool, "name", name)}
        for key in ("description", "parameters"):
            if tool.get(key) is not None:
                function[key] = tool[key]
        found.append({"type": "function", "function": function})
    return found


def choice_of(given: str | Mapping[str, Any] | None) -> Any:
    """Return the choice of a tool as in ``Session.generate``.

    Raises:
        InvalidRequest: it is not supported.
    """
    if given is None or given in ("auto", "none"):
        return "auto"
    if given == "required":
        return "required"
    if isinstance(given, Mapping) and given.get("type") == "function":
        return {"type": "function", "function": {"name": _string(given, "name", "tool_choice")}}
    kind = given.get("type") if isinstance(given, Mapping) else given
    raise InvalidRequest(
        f"tool_choice {kind!r:.99} is not supported; give 'auto', 'none', 'required', or "
        "{'type': 'function', 'name': ...}"
    )


def check_fields(given: Mapping[str, Any], known: Sequence[str], name: str) -> None:
    """Raise ``InvalidRequest`` if a field asks for something that is not supported."""
    for key, value in given.items():
        if key not in known and value not in (None, [], {}, "") and value is not False:
            raise InvalidRequest(f"the field '{name}.{key}' is not supported")
