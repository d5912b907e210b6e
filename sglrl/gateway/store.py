"""Store the conversations of a session, which requests continue by ``previous_response_id``.

The field is part of OpenAI's Responses API.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from hashlib import blake2b

import msgspec

from ..inference.completion import Completion
from .answers import message_of
from .dialect import Message, TurnRequest, encode
from .errors import HttpError


class Store:
    """The conversations of one session, each with its answer.

    Clients that send the whole conversation with every request repeat its messages. Equal messages
    are stored once, so the memory is linear in the text of the session.
    """

    def __init__(self) -> None:
        self._conversations: dict[str, list[Message]] = {}
        """Each conversation by the id of the answer at its end."""
        self._messages: dict[bytes, Message] = {}
        """All different messages by their digests."""

    def find(self, id_: str) -> list[Message]:
        """Return the conversation that ends with an answer.

        Raises:
            HttpError: no answer with this id is stored.
        """
        conversation = self._conversations.get(id_)
        if conversation is None:
            raise HttpError(
                400,
                f"this session has no response {id_!r:.200}, or it was not stored",
                code="previous_response_not_found",
            )
        return conversation

    def add(
        self, requests: Sequence[TurnRequest], sampling: asyncio.Task[list[Completion]]
    ) -> None:
        """Store the conversations of requests and their answers, if they were sampled.

        Args:
            requests: the requests as ``continued`` returned them.
            sampling: the finished task that has sampled the answers.
        """
        if sampling.cancelled() or sampling.exception() is not None:
            return
        for request, completion in zip(requests, sampling.result(), strict=False):
            if request.stored.id:
                own = (request.messages or ())[request.stored.unstored :]
                self._conversations[request.stored.id] = [
                    self._shared(message) for message in [*own, message_of(completion)]
                ]

    def _shared(self, message: Message) -> Message:
        digest = blake2b(encode(message), digest_size=16).digest()
        return self._messages.setdefault(digest, message)


def continued(request: TurnRequest, store: Store | None) -> TurnRequest:
    """Add the stored conversation that a request continues to the messages of the request.

    The stored conversation comes after the ``unstored`` messages and before all others.

    Args:
        request: the request.
        store: the store of the session. None: the request belongs to no session.

    Raises:
        HttpError: the conversation is not in the store.
    """
    stored, messages = request.stored, request.messages or ()
    if not stored.previous:
        return request
    if store is None:
        raise HttpError(
            400,
            "previous_response_id needs a session, and this request belongs to none; send the "
            "whole conversation",
            code="previous_response_not_found",
        )
    first, new = messages[: stored.unstored], messages[stored.unstored :]
    whole = [*first, *store.find(stored.previous), *new]
    return msgspec.structs.replace(request, messages=whole)
