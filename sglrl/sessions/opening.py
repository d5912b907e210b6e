"""Find where a turn begins, if the assistant's turn has begun and nothing of it is sampled.

This is the place of a session before its first turn, and after ``go_back``. What is observed there
belongs to the prompt: an environment is often reset in the agent, after the session was opened.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..core.turn_tree import ROOT
from ..errors import UsageError
from ..inference.prompts import Message
from .history import History, Position, beginning
from .observations import Dialogue, Observation
from .session_spec import SessionSpec

_TOO_LATE = (
    "messages were observed after text or token ids, and no turn was sampled in between: use "
    "unobserve, and observe the messages first"
)


def check_messages_first(place: Position, waiting: Sequence[Observation]) -> None:
    """Raise ``UsageError`` if messages cannot follow at a place where the turn has begun.

    Args:
        waiting: what was observed there before.
    """
    if waiting:
        raise UsageError(_TOO_LATE)
    if place.dialogue.begun:
        raise UsageError(
            "the prompt ends within the assistant's turn (continue_final_message), so no message "
            "can follow it: observe text or token ids"
        )


async def opened(
    spec: SessionSpec,
    history: History,
    place: Position,
    given: list[Message] | None,
    observed: Sequence[Observation],
) -> tuple[Position, list[Observation]]:
    """Return the place at which the turn goes on, with its tokens, and the other observations.

    Messages continue the conversation of the place. If an earlier turn ends a part of it, its
    exact tokens are kept, as by ``Session.rewrite``.

    Args:
        given: the messages of the conversation; None: the prompt of ``spec``.

    Raises:
        InvalidRequest: there is no prompt, or the chat template rejects it.
        UsageError: messages were observed after text or token ids.
    """
    rest = list(observed)
    messages: list[Message] = []
    while rest and isinstance(first := rest[0], list):
        messages += first
        del rest[0]
    if any(isinstance(item, list) for item in rest):
        raise UsageError(_TOO_LATE)
    dialogue = place.dialogue
    if messages:
        whole = [*(dialogue.messages or ()), *messages]
        turn = history.find(whole)
        if turn != ROOT:
            return history.after(turn), [whole[history.message_count(turn) :], *rest]
        given, dialogue = whole, Dialogue(whole)
    elif place.tokens:
        return place, rest
    if spec.promptless and given is None and rest:
        text = rest.pop(0)
        assert not isinstance(text, list)
        tokens = await spec.encode_text(text) if isinstance(text, str) else text
    else:
        tokens = await spec.ids(given)
    dialogue = dialogue._replace(answer_at=len(tokens))
    return beginning(dialogue)._replace(tokens=tokens), rest
