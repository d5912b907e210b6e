"""Find the text that a chat template puts after the assistant's answer.

A template renders whole conversations. Rendering a conversation again gives text, and the tokens of
that text may differ from the sampled tokens. A session therefore keeps its tokens and appends only
the text that the template writes after the assistant's answer: the end of the turn, the new
messages, and the beginning of the next turn. The result is the same conversation only if the
template does not change the earlier text. This module checks that. If it does, the session
branches: the prompt of its next turn is the whole conversation, rendered again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..errors import InvalidRequest
from ..inference.prompts import Message

Render = Callable[[Sequence[Message]], str]
"""Applies the template to messages and returns the text up to the assistant's turn."""

_MARK = "\u2063\u2062answer\u2062\u2063"
"""Marks the answer with invisible operators, which no conversation has and no template trims."""


class Continued(NamedTuple):
    """How a conversation goes on after the assistant's answer.

    Attributes:
        text: what follows the answer; the whole conversation if it is rewritten.
        rewritten: whether the template renders earlier text differently.
    """

    text: str
    rewritten: bool


def continued(
    render: Render,
    history: Sequence[Message],
    text: str,
    answer: Message,
    new: Sequence[Message],
    *,
    allow_rewrite: bool,
) -> Continued:
    """Return the text between the assistant's answer and its next turn.

    Args:
        history: the messages before the answer.
        text: the sampled text, without the stop token.
        answer: the same as a message.
        new: the messages that follow the answer.
        allow_rewrite: append what the template puts after the answer even if it renders ``history``
            or the answer differently when ``new`` follows.

    Raises:
        InvalidRequest: the template omits the answer, with ``allow_rewrite``.
    """
    if allow_rewrite:
        whole = render([*history, {"role": "assistant", "content": _MARK}, *new])
        at = whole.rfind(_MARK)
        if at < 0:
            raise InvalidRequest("the chat template leaves the assistant's answer out")
        return Continued(whole[at + len(_MARK) :], False)
    before = render(history) + text
    whole = render([*history, answer, *new])
    if whole.startswith(before):
        return Continued(whole[len(before) :], False)
    return Continued(whole, True)
