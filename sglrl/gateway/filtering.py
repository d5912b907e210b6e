"""Reject, omit or change tools and system messages that the model cannot be shown."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

import msgspec

from ..config import GatewayOptions
from ..errors import InvalidRequest
from ..inference.prompts import check_conversation
from .dialect import Message, TurnRequest

logger = logging.getLogger("sglrl.gateway")
_SEPARATOR = "\n\n"


class Filtering:
    """Applies the options of a gateway to requests.

    Args:
        options: the options of the gateway.
        shows_system: whether the model's chat template writes system messages that come after the
            first message.
    """

    def __init__(self, options: GatewayOptions, shows_system: bool = True) -> None:
        self._options = options
        self._shows_system = shows_system
        self._warned: set[str] = set()

    def check_tools(self, request: TurnRequest) -> None:
        """Check the tools that the model cannot be shown. Log each omitted type of tool once.

        Raises:
            InvalidRequest: there is a tool that cannot be shown, and the options reject it.
        """
        for tool in request.left_out:
            if self._options.unsupported_tools == "reject":
                raise InvalidRequest(
                    f"{tool} cannot be shown to the model, because only its provider's servers "
                    'know it: omit it, or let the gateway leave it out (unsupported_tools="omit" '
                    "of sglrl.serve and sglrl.GatewayOptions, sglrl serve --unsupported-tools omit)"
                )
            kind = re.sub(r"^tools\[\d+\][^ ]* ", "a tool ", tool)
            if kind not in self._warned:
                self._warned.add(kind)
                logger.warning("%s cannot be shown to the model, and is left out", kind)

    def shown(self, request: TurnRequest) -> TurnRequest:
        """Return the request with system messages that the chat template can write.

        Raises:
            InvalidRequest: the chat template cannot write a system message, and the options keep
                it.
        """
        messages = request.messages or ()
        later = [at for at, one in enumerate(messages) if at and one.get("role") == "system"]
        if not later:
            return request
        if self._options.later_system == "keep":
            if self._shows_system:
                return request
            raise InvalidRequest(
                f"message {later[0]} is a system message after the first message, and this "
                "model's chat template has no place for it: send one system message, or let the "
                'gateway change it (later_system="user" or "merge" of sglrl.serve and '
                "sglrl.GatewayOptions, sglrl serve --later-system user)"
            )
        changed = _one_system(check_conversation(messages), self._options.later_system == "merge")
        return msgspec.structs.replace(request, messages=changed)


def _one_system(messages: Sequence[Mapping[str, Any]], merges: bool) -> list[Message]:
    """Return the messages with at most one system message, which comes first.

    Args:
        messages: the messages of a conversation.
        merges: whether to join all system messages. False: system messages at the beginning are
            joined, and later ones become user messages.
    """
    leading = sum(1 for _ in takewhile(_is_system, messages))
    among = messages if merges else messages[:leading]
    joined = [one for one in among if _is_system(one)]
    result: list[Message] = []
    if joined:
        text = _SEPARATOR.join(one["content"] for one in joined)
        result.append({**joined[0], "content": text})
    for one in messages[leading:]:
        if not _is_system(one):
            result.append(dict(one))
        elif not merges:
            result.append({**one, "role": "user"})
    return result


def _is_system(message: Mapping[str, Any]) -> bool:
    return message.get("role") == "system"
