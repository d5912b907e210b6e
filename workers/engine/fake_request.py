"""What the fake engine has to do: its requests, and work between two steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec
import numpy as np


class Order(NamedTuple):
    """Work between two steps. See ``FakeEngine.order``."""

    work: Callable[[], None]
    inflight: str
    is_over: Callable[[], bool]


class Running(msgspec.Struct):
    """One request.

    Attributes:
        prompt: int32 token ids.
        answer: the tokens that are repeated, int32.
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
    answer: bytes
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
    finish: str = "length"
    stop_match: int | None = None

    def answer_with(self, answer: bytes, stops: tuple[int, ...]) -> None:
        """Let the request end with the answer, or with a stop token in it.

        Args:
            answer: int32 token ids.
            stops: token ids that end the request.
        """
        ids = np.frombuffer(answer, "<i4")
        ends = np.flatnonzero(np.isin(ids, stops))
        count = int(ends[0]) + 1 if len(ends) else len(ids)
        self.answer = answer
        if count <= self.limit:
            self.limit, self.finish = count, "stop"
            self.stop_match = int(ids[count - 1])
