"""Encode observations: the tokens that follow the last turn of a conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from ..config import type_of
from ..errors import InvalidRequest
from ..inference.message import AssistantMessage
from ..inference.prompts import Message, check_conversation
from ..inference.renderer import Renderer
from ..inference.tokens import check_ids, without_surrogates
from .continuation import continued
from .session_spec import SessionSpec

Observation: TypeAlias = str | bytes | list[Message]
"""An observation is text, token ids (int32 bytes) or messages."""


class Dialogue(NamedTuple):
    """A conversation of messages up to the assistant's current turn.

    Attributes:
        messages: all messages before this turn, or None if the session did not begin with messages.
        begun: the beginning of this turn's text, if the prompt contains it
            (``continue_final_message``), otherwise "".
        answer_at: the size in bytes of all tokens before this turn's first sampled token.
    """

    messages: list[Message] | None
    begun: str = ""
    answer_at: int = 0


def as_observation(given: Any, vocab_size: int) -> Observation:
    """Check the argument of ``Session.observe``, and return it as an observation.

    The observation may be empty.

    Raises:
        InvalidRequest: the argument is not text, token ids or messages, or a part of it is wrong.
    """
    if isinstance(given, str):
        return given
    if type(given) is list and given and type(given[0]) is int:
        # Test for a list of ints first, because isinstance(..., Mapping) is slow.
        return check_ids(given, vocab_size)
    several = isinstance(given, (list, tuple)) and given and isinstance(given[0], Mapping)
    if isinstance(given, Mapping) or several:
        messages = check_conversation([given] if isinstance(given, Mapping) else list(given))
        return [dict(message) for message in messages]
    if not hasattr(given, "__len__"):
        raise InvalidRequest(f"an observation is text, token ids or messages, got {type_of(given)}")
    # An empty list is allowed: the output of a tool may be empty.
    return check_ids(given, vocab_size) if len(given) else b""


def encode_observations(
    spec: SessionSpec,
    observed: Sequence[Observation],
    tokens: bytes,
    dialogue: Dialogue,
    end: int | None,
    said: AssistantMessage | None,
) -> tuple[bytes, Dialogue]:
    """Encode observations and append them to the conversation.

    If the chat template rewrites earlier turns, the result is the whole conversation, encoded anew.

    Args:
        tokens: all tokens so far, int32 bytes.
        end: the end token if the model sampled one as its last token, otherwise None.
        said: the assistant's turn as parsed by the renderer, or None without a renderer.

    Returns:
        All tokens, and the dialogue, both with the observations.

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
            tokens += check_ids(box.encode_rendered([item])[0], spec.requests.vocab_size)
            continue
        assert dialogue.messages is not None
        # Without this check, a renderer would leave out messages of unknown roles.
        box.check_roles(item, spec.template, begin=len(dialogue.messages) + 1)
        ended = end if len(tokens) == size else None
        if spec.renderer is None:
            said = None
        elif said is None or len(tokens) != size:
            said = parsed(spec.renderer, tokens, dialogue, 0)
        text = _text_of(spec, tokens, dialogue, ended is not None)
        answer = _message_of(text, dialogue, said)
        bridge = after = None
        if spec.renderer is not None and said is not None:
            bridge = _bridge(spec.renderer, tokens, dialogue.answer_at, said, item)
        if bridge is None:
            after = continued(
                spec.render,
                dialogue.messages,
                text,
                answer,
                item,
                allow_rewrite=spec.options.allow_rewrite,
                parsed=None if said is None else dialogue.begun + said.content,
            )
            if after.only_form and spec.renderer is not None and said is not None:
                renderer = spec.renderer.keeping_thoughts()
                bridge = _bridge(renderer, tokens, dialogue.answer_at, said, item)
        if bridge is not None:
            tokens = check_ids(bridge, spec.requests.vocab_size)
        elif after is not None:
            ids = box.encode_rendered([after.text])[0]
            if ended is not None and not after.rewritten and ids[:1] == [ended]:
                # The model sampled the end token that the template writes, so add it only once.
                ids = ids[1:]
            tokens = (b"" if after.rewritten else tokens) + check_ids(ids, spec.requests.vocab_size)
        dialogue = Dialogue([*dialogue.messages, answer, *item], answer_at=len(tokens))
    return tokens, dialogue


def answer_of(
    spec: SessionSpec, tokens: bytes, dialogue: Dialogue, ended: bool, said: AssistantMessage | None
) -> dict[str, Any]:
    """Return the assistant's current turn as a message.

    Args:
        ended: whether the last token is an end token, which is not part of the text.
        said: the turn as parsed by the renderer, or None without a renderer.
    """
    text = "" if said is not None else _text_of(spec, tokens, dialogue, ended)
    return _message_of(text, dialogue, said)


def _message_of(text: str, dialogue: Dialogue, said: AssistantMessage | None) -> dict[str, Any]:
    """Return the message of the parsed turn, or a message with ``text`` if ``said`` is None."""
    if said is None:
        return {"role": "assistant", "content": text}
    message = said.as_dict()
    # Messages become a part of trajectories, whose texts are UTF-8.
    whole = {**message, "content": dialogue.begun + message["content"]}
    clean: dict[str, Any] = without_surrogates(whole)
    return clean


def _text_of(spec: SessionSpec, tokens: bytes, dialogue: Dialogue, ended: bool) -> str:
    ids = np.frombuffer(tokens[dialogue.answer_at :], "<i4").tolist()
    return dialogue.begun + spec.requests.decode(ids[:-1] if ended else ids, False)


def parsed(renderer: Renderer, tokens: bytes, dialogue: Dialogue, turn: int) -> AssistantMessage:
    """Parse the assistant's current turn with the renderer.

    Args:
        turn: the number of the turn, for the ids of its calls.
    """
    ids = np.frombuffer(tokens, "<i4").tolist()
    at = dialogue.answer_at // 4
    return renderer.parse(ids[:at], ids[at:], turn)


def _bridge(
    renderer: Renderer,
    tokens: bytes,
    answer_at: int,
    said: AssistantMessage,
    new: Sequence[Message],
) -> list[int] | None:
    """Return the tokens of the next turn's prompt, or None if earlier tokens would change."""
    names = {call.id: call.name for call in said.tool_calls}
    # Some formats write the name of the tool before its result.
    named = [
        {"name": names[message["tool_call_id"]], **message}
        if message.get("tool_call_id") in names
        else message
        for message in new
    ]
    ids = np.frombuffer(tokens, "<i4").tolist()
    return renderer.bridge(ids[: answer_at // 4], ids[answer_at // 4 :], named)


def _joined(observed: Sequence[Observation]) -> list[Observation]:
    """Join adjacent lists of messages. The model has given no answer between them.

    Adjacent lists arise when a turn fails: one list was observed before the turn, the other while
    it was being sampled.
    """
    joined: list[Observation] = []
    for item in observed:
        if isinstance(item, list) and joined and isinstance(joined[-1], list):
            joined[-1] = [*joined[-1], *item]
        else:
            joined.append(item)
    return joined
