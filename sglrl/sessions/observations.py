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


class Encoded(NamedTuple):
    """The end of a conversation.

    Attributes:
        response: the tokens after the prompt, int32 bytes.
        messages: all messages before the assistant's current turn; None: the session has none.
        answer_at: byte of ``response`` at which the assistant's current turn begins.
    """

    response: bytes
    messages: list[Message] | None
    answer_at: int


def encode_observations(
    spec: SessionSpec, observed: Sequence[Observation], last: Encoded, end: int | None
) -> Encoded:
    """Encode observations and append them to the conversation.

    Args:
        last: the end of the conversation so far.
        end: the end token that the model sampled as its last token, if it did.

    Raises:
        InvalidRequest: the chat template rejects the messages, or a token id is wrong.
    """
    box = spec.requests.box
    response, messages, answer_at = last
    for item in _joined(observed):
        if isinstance(item, bytes):
            response += item
            continue
        if isinstance(item, str):
            response += check_ids(box.encode_rendered([item])[0], spec.vocab_size)
            continue
        assert messages is not None
        tokens = np.frombuffer(response[answer_at:], "<i4").tolist()
        ended = end if len(response) == len(last.response) else None
        answer = box.decode(tokens if ended is None else tokens[:-1], False)
        text = behind_answer(spec.render, messages, answer, item, allow_rewrite=spec.allow_rewrite)
        ids = box.encode_rendered([text])[0]
        if ended is not None and ids[:1] == [ended]:
            # The model sampled the same end token as the template writes, so add it only once.
            ids = ids[1:]
        response += check_ids(ids, spec.vocab_size)
        messages = [*messages, {"role": "assistant", "content": answer}, *item]
        answer_at = len(response)
    return Encoded(response, messages, answer_at)


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
