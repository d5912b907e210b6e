"""Find the text that a chat template puts after the assistant's answer.

A template renders whole conversations. Rendering a conversation again gives text, and the tokens of
that text may differ from the sampled tokens. A session therefore keeps its tokens and appends only
the text that the template writes after the assistant's answer: the end of the turn, the new
messages, and the beginning of the next turn. The result is the same conversation only if the
template renders the earlier text as before. This module checks it. If the template changes the
earlier text, the session branches: its next prompt is the whole conversation, rendered again.

A template may render the answer in another form. It may trim white space, or write the arguments of
a call in another order. In these cases, the session keeps the sampled tokens. If the template
removes the reasoning of the answer, or a part of its text, the session branches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..errors import InvalidRequest
from ..inference.prompts import Message

Render = Callable[[Sequence[Message]], str]
"""Applies the template to messages. The text includes the prompt of the assistant's next turn."""

_MARK = "\u2063\u2062answer\u2062\u2063"
"""Stands for the answer in a rendered text: invisible characters that no template trims."""
_THOUGHT = "\u2063\u2062thought\u2062\u2063"
"""Stands for the reasoning of the answer in a rendered text."""


class Continued(NamedTuple):
    """The text with which a conversation goes on after the assistant's answer.

    Attributes:
        text: the text after the answer, or the whole conversation if ``rewritten`` is True.
        rewritten: whether the template renders earlier text differently.
        only_form: True if ``rewritten`` is True only because the answer has tool calls, so that its
            end cannot be found in the rendered text. A renderer may be able to find the end.
    """

    text: str
    rewritten: bool
    only_form: bool = False


def continued(
    render: Render,
    history: Sequence[Message],
    text: str,
    answer: Message,
    new: Sequence[Message],
    *,
    allow_rewrite: bool,
    parsed: str | None = None,
) -> Continued:
    """Return the text between the assistant's answer and its next turn.

    Args:
        history: the messages before the answer.
        text: the text of the answer, without its end token.
        answer: the answer as a message.
        new: the messages that follow the answer.
        allow_rewrite: append the template's text after the answer even if the template renders
            ``history`` or the answer differently when ``new`` follows.
        parsed: the content before the calls if a renderer has parsed the answer, otherwise None.

    Raises:
        InvalidRequest: ``allow_rewrite`` is True and the template omits the answer.
    """
    if allow_rewrite:
        whole = render([*history, {"role": "assistant", "content": _MARK}, *new])
        at = whole.rfind(_MARK)
        if at < 0:
            raise InvalidRequest("the chat template leaves the assistant's answer out")
        return Continued(whole[at + len(_MARK) :], False)
    head = render(history)
    whole = render([*history, answer, *new])
    if whole.startswith(head + text):
        return Continued(whole[len(head) + len(text) :], False)
    thinks = parsed is not None and _thinks(text, answer, parsed)
    marked = _rendered(render, [*history, _marked(answer, thinks), *new])
    if not marked.startswith(head) or (thinks and _THOUGHT not in marked):
        return Continued(whole, True)
    if answer.get("tool_calls"):
        return Continued(whole, True, only_form=True)
    answered, mark, after = marked.rpartition(_MARK)
    if not mark or len(answered) < len(head):
        return Continued(whole, True)
    if parsed is None:
        said = whole[len(head) : len(whole) - len(after)]
        if not whole.endswith(after) or _without_space(said) != _without_space(text):
            return Continued(whole, True)
    return Continued(after, False)


def _thinks(text: str, answer: Message, parsed: str) -> bool:
    """Return whether a parsed answer has a reasoning block, which may be empty.

    Args:
        text: the text of the answer. A reasoning block comes before the content.
        parsed: the content before the calls.
    """
    begin = _without_space(parsed)
    return bool(answer.get("reasoning_content")) or not _without_space(text).startswith(begin)


def _marked(answer: Message, thinks: bool) -> Message:
    """Return the answer with marks in place of its content and its reasoning."""
    marked = {**answer, "content": _MARK}
    marked.pop("reasoning_content", None)
    return {**marked, "reasoning_content": _THOUGHT} if thinks else marked


def _rendered(render: Render, messages: Sequence[Message]) -> str:
    """Return the text of a conversation, or "" if the template rejects it."""
    try:
        return render(messages)
    except InvalidRequest:
        return ""


def _without_space(text: str) -> str:
    return "".join(text.split())
