"""A request of the fake engine."""

from __future__ import annotations

import msgspec


class Running(msgspec.Struct):
    """One request.

    Attributes:
        prompt: int32 token ids.
        limit: the number of new tokens.
        done: the number of new tokens so far.
        sent: how many of them the engine has reported.
        top: the number of likeliest tokens at each position.
        mask: report the sampling mask.
        given: token ids whose logprobs are wanted at each position.
        hidden: report the hidden states.
        routed: the first position without a row of routed experts; -1: they are not wanted.
    """

    prompt: bytes
    limit: int
    logprobs: bool
    stream: bool
    top: int
    mask: bool
    given: tuple[int, ...]
    hidden: bool
    routed: int
    done: int = 0
    sent: int = 0
    lora: str = ""
