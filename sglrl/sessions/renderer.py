"""Find the text that a chat template puts after the assistant's answer.

A template renders whole conversations. Rendering a conversation again gives text, and the tokens of
that text may differ from the sampled tokens. A session therefore keeps its tokens and appends only
the text that the template writes after the assistant's answer: the end of the turn, the new
messages, and the beginning of the next turn. The result is the same conversation only if the
template does not change the earlier text. This module checks that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..errors import InvalidRequest
from ..inference.prompts import Message

Render = Callable[[Sequence[Message]], str]
"""Applies the template to messages and returns the text up to the assistant's turn."""

_MARK = "\u2063\u2062answer\u2062\u2063"
"""Marks the answer with invisible operators, which no conversation has and no template trims."""


def behind_answer(
    render: Render,
    history: Sequence[Message],
    answer: str,
    new: Sequence[Message],
    *,
    allow_rewrite: bool,
) -> str:
    """Return the text between the assistant's ``answer`` and its next turn.

    Args:
        history: the messages before the answer.
        answer: the sampled text, without the stop token.
        new: the messages that follow the answer.
        allow_rewrite: accept a template that renders ``history`` or ``answer`` differently when
            ``new`` follows.

    Raises:
        InvalidRequest: the template rewrites earlier text, or omits the answer.
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
            "the chat template rewrites earlier turns when the conversation continues: "
            f"{before[start : same + 40]!r} becomes {whole[start : same + 40]!r}. A session only "
            "appends, so that every token stays as it was sampled. Observe text or ids, or open "
            "the session with allow_rewrite=True to append what the template puts behind the answer"
        )
    return whole[len(before) :]
