"""What a chat template puts behind the model's own tokens when a conversation goes on.

A template renders whole conversations, and rendering one again gives text, whose tokens need not
be those that were sampled. So a session keeps the tokens that it has and appends only what the
template writes behind the assistant's turn: its end, the new messages, and the beginning of the
next turn. That is the same conversation only if the template leaves what is before as it was, which
is checked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..errors import InvalidRequest
from ..inference.prompts import Message

Render = Callable[[Sequence[Message]], str]
"""Applies the template, ready for the assistant's turn."""

_MARK = "\u2063\u2062answer\u2062\u2063"
"""Invisible operators: in no conversation, and no template trims them."""


def behind_answer(
    render: Render,
    history: Sequence[Message],
    answer: str,
    new: Sequence[Message],
    *,
    allow_rewrite: bool,
) -> str:
    """The text between the assistant's ``answer`` to ``history`` and its next turn.

    Args:
        answer: as sampled, without what ended it.
        new: the messages that follow it.
        allow_rewrite: take that text also from a template that renders ``history`` or ``answer``
            otherwise once ``new`` follows.

    Raises:
        InvalidRequest: the template rewrites what is before, or leaves the answer out.
    """
    if allow_rewrite:
        whole = render([*history, {"role": "assistant", "content": _MARK}, *new])
        at = whole.rfind(_MARK)
        if at < 0:
            raise InvalidRequest("the chat template leaves the assistant's answer out")
        return whole[at + len(_MARK) :]
    before = render(history) + answer
    whole = render([*history, {"role": "assistant", "content": answer}, *new])
    if not whole.startswith(before):
        same = next((i for i, (a, b) in enumerate(zip(before, whole, strict=False)) if a != b), 0)
        start = max(0, same - 20)
        raise InvalidRequest(
            "the chat template rewrites earlier turns when the conversation goes on: "
            f"{before[start : same + 40]!r} becomes {whole[start : same + 40]!r}. A session only "
            "appends, so that every token stays as it was sampled. Observe text or ids, or open "
            "the session with allow_rewrite=True to append what the template puts behind the answer"
        )
    return whole[len(before) :]
