"""Encode observations: the tokens that follow the last turn of a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from ..inference.prompts import Message
from ..inference.tokens import check_ids
from .renderer import continued
from .session_spec import SessionSpec

Observation: TypeAlias = str | bytes | list[Message]
"""Text, token ids (int32 bytes) or messages."""


class Dialogue(NamedTuple):
    """A conversation of messages up to the assistant's current turn.

    Attributes:
        messages: all messages before this turn; None: the session has none.
        begun: text of this turn in the prompt of the session: ``continue_final_message``.
        answer_at: byte of all tokens at which the rest of this turn begins.
    """

    messages: list[Message] | None
    begun: str = ""
    answer_at: int = 0


def encode_observations(
    spec: SessionSpec,
    observed: Sequence[Observation],
    tokens: bytes,
    dialogue: Dialogue,
    end: int | None,
) -> tuple[bytes, Dialogue]:
    """Encode observations and append them to the conversation.

    If the chat template rewrites earlier turns, the result is the whole conversation, encoded anew.

    Args:
        tokens: all tokens so far, int32 bytes.
        end: the end token that the model sampled as its last token, if it did.

    Returns:
        The tokens and the dialogue with the observations.

    Raises:
        InvalidRequest: the chat template rejects the messages, or a token id is wrong.
    """
    box = spec.requests.box
    size = len(tokens)
    for item in _joined(observed):
        if isinstance(item, bytes):
            tokens += item
            continue
        if isinstance(item, str):
            tokens += check_ids(box.encode_rendered([item])[0], spec.vocab_size)
            continue
        assert dialogue.messages is not None
        ended = end if len(tokens) == size else None
        answer = answer_of(spec, tokens, dialogue, ended is not None)
        text, rewritten = continued(
            spec.render, dialogue.messages, answer, item, allow_rewrite=spec.allow_rewrite
        )
        ids = box.encode_rendered([text])[0]
        if ended is not None and not rewritten and ids[:1] == [ended]:
            # The model sampled the same end token as the template writes, so add it only once.
            ids = ids[1:]
        tokens = (b"" if rewritten else tokens) + check_ids(ids, spec.vocab_size)
        messages = [*dialogue.messages, {"role": "assistant", "content": answer}, *item]
        dialogue = Dialogue(messages, answer_at=len(tokens))
    return tokens, dialogue


def answer_of(spec: SessionSpec, tokens: bytes, dialogue: Dialogue, ended: bool) -> str:
    """Return the text of the assistant's current turn.

    Args:
        ended: the last token ends the turn. It is not part of the text.
    """
    ids = np.frombuffer(tokens[dialogue.answer_at :], "<i4").tolist()
    return dialogue.begun + spec.requests.decode(ids[:-1] if ended else ids, False)


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
