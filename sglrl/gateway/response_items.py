"""Convert the input of OpenAI's Responses API to messages and tools of chat completions.

https://platform.openai.com/docs/api-reference/responses/create
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from ..errors import InvalidRequest
from .accepted_fields import RESPONSE_FIELDS
from .dialect import Message
from .tool_kinds import Shown, arguments_of, custom_function, shown_name

_ROLES: Final = {
    "user": "user",
    "system": "system",
    "developer": "system",
    "assistant": "assistant",
}
"""For each role of the Responses API, the role that chat templates know."""
_TEXTS: Final = {"input_text": "text", "output_text": "text", "refusal": "refusal"}
"""For each type of content that is text, the field with the text."""
_ORDER: Final = ("reasoning_content", "content", "tool_calls")
"""The parts of an assistant's message in the order in which an answer has them as items."""


def messages_of(given: str | Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return the messages of an input.

    An answer consists of items: reasoning, a message and calls, in this order. They become one
    message, as ``message_of`` returns it. An item begins another answer unless it comes later in
    this order than the item before it, or both are calls.

    Raises:
        InvalidRequest: an item is wrong, or its type is not supported. The error states its
            position.
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}] if given else []
    messages: list[Message] = []
    last = ""
    """The part of an answer that the previous item is. "": the next item begins a new message."""
    for at, item in enumerate(given):
        name = f"input[{at}]"
        role, part, value = _read(item, name)
        if role != "assistant":
            messages.append({"role": role, **value})
            last = ""
            continue
        if part == "reasoning_content" and not value:
            # The client has removed the text of the reasoning. The item still begins an answer.
            last = ""
            continue
        goes_on = last and (part == last == "tool_calls" or _ORDER.index(part) > _ORDER.index(last))
        if not goes_on:
            messages.append({"role": "assistant", "content": ""})
        if part == "tool_calls":
            messages[-1].setdefault(part, []).append(value)
        else:
            messages[-1][part] = value
        last = part
    return messages


def _read(item: Mapping[str, Any], name: str) -> tuple[str, str, Any]:
    """Return the role of an item, the part of an answer that it is, and its value.

    The part is "" if the item is not part of an answer.
    """
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
        text = _text_of(item, "content", name)
        if role == "assistant":
            return role, "content", text
        return role, "", {"content": text}
    if kind in ("function_call", "custom_tool_call"):
        if kind == "function_call":
            arguments = _string(item, "arguments", name)
        else:
            arguments = arguments_of(_string(item, "input", name))
        called = shown_name(_string(item, "name", name), str(item.get("namespace") or ""))
        function = {"name": called, "arguments": arguments}
        call = {"id": _string(item, "call_id", name), "type": "function", "function": function}
        return "assistant", "tool_calls", call
    if kind in ("function_call_output", "custom_tool_call_output"):
        text = _text_of(item, "output", name)
        return "tool", "", {"tool_call_id": _string(item, "call_id", name), "content": text}
    if kind == "reasoning":
        return "assistant", "reasoning_content", _reasoning_of(item.get("content"), name)
    if kind == "item_reference":
        raise InvalidRequest(f"{name} refers to an item, which is not supported: send the item")
    raise InvalidRequest(f"{name} is of type {kind!r:.99}, which is not supported")


def _text_of(item: Mapping[str, Any], key: str, name: str) -> str:
    """Return a text, or the joined texts of a list of parts. Return "" for null."""
    if key not in item:
        raise InvalidRequest(f"{name}.{key} is missing: give text or a list of parts")
    content, name = item[key], f"{name}.{key}"
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise InvalidRequest(f"{name} must be text or a list of parts, got {content!r:.99}")
    texts = []
    for at, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        field = _TEXTS.get(str(kind))
        if field is None:
            known = ", ".join(map(repr, _TEXTS))
            raise InvalidRequest(
                f"{name}[{at}] is of type {kind!r:.99}, and only text is supported: {known}"
            )
        texts.append(_string(part, field, f"{name}[{at}]"))
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


class Tools(NamedTuple):
    """The tools of a request.

    Attributes:
        functions: the schemas of the tools as functions, which chat templates know.
        shown: the tools of the client, by the name that the model sees.
        left_out: the positions and types of the tools that the model cannot be shown.
    """

    functions: list[dict[str, Any]]
    shown: dict[str, Shown]
    left_out: list[str]


def tools_of(given: Sequence[Mapping[str, Any]] | None) -> Tools:
    """Return the tools of a request.

    Raises:
        InvalidRequest: a tool has a field that is wrong or not supported, or two tools have the
            same name.
    """
    result = Tools([], {}, [])
    for at, tool in enumerate(given or ()):
        _add_tool(result, tool, f"tools[{at}]", "")
    return result


def _add_tool(result: Tools, tool: Mapping[str, Any], name: str, namespace: str) -> None:
    kind = tool.get("type")
    if kind == "namespace" and not namespace:
        check_fields(tool, ("type", "name", "description", "tools"), name, "tools[]")
        inner, within = tool.get("tools"), _string(tool, "name", name)
        if not isinstance(inner, list) or not all(isinstance(one, Mapping) for one in inner):
            raise InvalidRequest(f"{name}.tools must be a list of tools, got {inner!r:.99}")
        for at, one in enumerate(inner):
            _add_tool(result, one, f"{name}.tools[{at}]", within)
        return
    if kind not in ("function", "custom"):
        result.left_out.append(f"{name} of type {kind!r:.99}")
        return
    known = {"function": "parameters", "custom": "format"}[kind]
    check_fields(tool, ("type", "name", "description", known), name, "tools[]")
    own, text = _string(tool, "name", name), tool.get("description")
    shown = shown_name(own, namespace)
    one = Shown(own, namespace, kind == "custom")
    if result.shown.setdefault(shown, one) != one:
        raise InvalidRequest(f"{name} has the same name as another tool: {shown!r:.200}")
    if kind == "custom":
        function = custom_function(shown, str(text or ""), tool.get("format"))
    else:
        function = {"name": shown}
        for key in ("description", "parameters"):
            if tool.get(key) is not None:
                function[key] = tool[key]
    result.functions.append({"type": "function", "function": function})


def choice_of(given: str | Mapping[str, Any] | None) -> Any:
    """Return the value of ``tool_choice`` in the form of ``Session.generate``.

    Raises:
        InvalidRequest: the value is not supported.
    """
    if given is None or given in ("auto", "none"):
        return "auto"
    if given == "required":
        return "required"
    if isinstance(given, Mapping) and given.get("type") in ("function", "custom"):
        name = _string(given, "name", "tool_choice")
        namespace = given.get("namespace") or ""
        return {"type": "function", "function": {"name": shown_name(name, str(namespace))}}
    kind = given.get("type") if isinstance(given, Mapping) else given
    raise InvalidRequest(
        f"tool_choice {kind!r:.99} is not supported; give 'auto', 'none', 'required', or "
        "{'type': 'function', 'name': ...}"
    )


def check_fields(given: Mapping[str, Any], known: Sequence[str], name: str, part: str = "") -> None:
    """Raise ``InvalidRequest`` if a field asks for something that is not supported.

    Args:
        given: the fields of a part of the request.
        known: the names of the supported fields.
        name: the name of the part, for error messages.
        part: the path of the part in ``RESPONSE_FIELDS``. "": ``name``.
    """
    for key, value in given.items():
        path = f"{part or name}."
        if key not in known and not RESPONSE_FIELDS.accepts(path + key, value):
            hint = RESPONSE_FIELDS.hint(path, key, known)
            raise InvalidRequest(f"the field '{name}.{key}' is not supported{hint}")
