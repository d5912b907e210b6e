"""Find the roles whose messages a chat template leaves out.

A template is a program. Many templates write nothing for a role that they do not handle, and the
prompt then lacks the message without an error. This module detects such roles: it renders
conversations with a message of the role, and searches for the message in the text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from ..errors import InvalidRequest

Render = Callable[[Sequence[Mapping[str, Any]]], str]
"""A function that applies a chat template to messages and returns the text."""

_ALWAYS: Final = ("user", "assistant")
"""The roles that every chat template writes."""
_USUAL: Final = ("system", "user", "assistant", "tool")
_MARK: Final = "the content of this message"
_ASK: Final = {"role": "user", "content": "What is 1 + 2?"}
_CALL: Final = {
    "id": "call_0",
    "type": "function",
    "function": {"name": "add", "arguments": {"a": 1, "b": 2}},
}
_BEFORE: Final[tuple[list[dict[str, Any]], ...]] = (
    [_ASK],
    [_ASK, {"role": "assistant", "content": "3"}],
    [_ASK, {"role": "assistant", "content": "", "tool_calls": [_CALL]}],
)
"""Conversations that a message of a role may follow."""


class Roles:
    """Checks which roles one chat template writes, and remembers the results.

    Args:
        render: applies the template to messages.
    """

    def __init__(self, render: Render) -> None:
        self._render = render
        self._known: dict[tuple[str, bool], bool] = {}

    def check(self, messages: Sequence[Mapping[str, Any]], *, begin: int = 0) -> None:
        """Check that the template writes messages of every role that ``messages`` have.

        Args:
            begin: the number of messages before ``messages`` in the conversation.

        Raises:
            InvalidRequest: the template omits messages of a role. The error names the role.
        """
        for at, message in enumerate(messages, begin):
            role = message["role"]
            if role in _ALWAYS or self._knows(role, not at):
                continue
            known = ", ".join(repr(role) for role in _USUAL if self._knows(role, not at))
            raise InvalidRequest(
                f"the chat template leaves out messages of the role {role!r:.99}, here message "
                f"{at}; use one of the roles {known}"
            )

    def _knows(self, role: str, first: bool) -> bool:
        """Return whether the template writes a message of this role.

        Args:
            first: whether the message is the first one of its conversation.
        """
        key = role, first
        if key not in self._known:
            self._known[key] = self._writes(role, first)
        return self._known[key]

    def _writes(self, role: str, first: bool) -> bool:
        message = {"role": role, "content": _MARK, "tool_call_id": "call_0", "name": "add"}
        probes = [[message, _ASK]] if first else [[*before, message] for before in _BEFORE]
        texts = []
        for probe in probes:
            try:
                texts.append(self._render(probe))
            except InvalidRequest:
                # The template rejects this order of roles with an error, so it omits nothing.
                continue
        return not texts or any(_MARK in text for text in texts)
