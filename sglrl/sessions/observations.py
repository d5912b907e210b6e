"""Encode observations: the tokens that follow the last turn of a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from ..inference.prompts import Message
from ..inference.tokens import check_ids
from .renderer import behind_answer
from .session_spec import SessionSpec

Observation: TypeAlias = str | bytes | list[Message]
"""Text, token ids (int32 bytes) or messages."""


class Dialogue(NamedTuple):
    """A conversation of messages up to the assistant's current turn.

    Attributes:
        messages: all messages before this turn; None: the session has none.
        begun: text of this turn in the prompt of the session: ``continue_final_message``.
        answer_at: byte of the response at which the rest of this turn begins.
    """

    messages: list[Message] | None
    begun: str = ""
    answer_at: int = 0


def encode_observations(
    spec: SessionSpec,
    observed: Sequence[Observation],
    response: bytes,
    dialogue: Dialogue,
    end: int | None,
) -> tuple[bytes, Dialogue]:
    """Encode observations and append them to the conversation.

    Args:
        response: the tokens after the prompt so far, int32 bytes.
        end: the end token that the model sampled as its last token, if it did.

    Returns:
        The response and the dialogue with the observations.

    Raises:
        InvalidRequest: the chat template rejects the messages, or a token id is wrong.
    """
    box = spec.requests.box
    size = len(response)
    for item in _joined(observed):
        if isinstance(item, bytes):
            response += item
            continue
        if isinstance(item, str):
            response += check_ids(box.encode_rendered([item])[0], spec.vocab_size)
            continue
        messages, begun, answer_at = dialogue
        assert messages is not None
        tokens = np.frombuffer(response[answer_at:], "<i4").tolist()
        ended = end if len(response) == size else None
        answer = begun + box.decode(tokens if ended is None else tokens[:-1], False)
        text = behind_answer(spec.render, messages, answer, item, allow_rewrite=spec.allow_rewrite)
        ids = box.encode_rendered([text])[0]
        if ended is not None and ids[:1] == [ended]:
            # The model sampled the same end token as the template writes, so add it only once.
            ids = ids[1:]
        response += check_ids(ids, spec.vocab_size)
        messages = [*messages, {"role": "assistant", "content": answer}, *item]
        dialogue = Dialogue(messages, answer_at=len(response))
    return response, dialogue


def _joined(observed: Sequence[Observation]) -> list[Observation]:
    """Join adjacent lists of messages, because no answer is between them.

    Adjacent lists arise when a turn fails: one list was observed before the turn, the other while
    it was being sampled.
    """
    found: list[Observation] = []
    for item in observed:
        if isinstance(item, list) and found and isinstance(found[-1], list):
            found[-1] = [*found[-1], *item]
        else:
            found.append(item)
    return found
