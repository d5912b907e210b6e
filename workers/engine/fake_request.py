"""The work of the fake engine: its requests, and orders to execute between two steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec
import numpy as np


class Order(NamedTuple):
    """Work to do between two steps. See ``FakeEngine.order`` for the fields."""

    work: Callable[[], None]
    inflight: str
    is_over: Callable[[], bool]


class Running(msgspec.Struct):
    """One request.

    Attributes:
        prompt: the prompt as int32 token ids.
        answer: the output as int32 token ids, repeated if it is shorter than ``limit``.
        limit: the total number of new tokens.
        done: the number of new tokens so far.
        sent: the number of new tokens that the engine has reported.
        top: the number of likeliest tokens to report at each position.
        mask: whether to report the sampling mask.
        given: token ids whose logprobs to report at each position.
        hidden: whether to report the hidden states.
        routed: the first position whose routed experts were not reported, or -1 to report none.
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
        """Output ``answer`` up to its first stop token, or all of it. ``limit`` still applies.

        Args:
            answer: int32 token ids.
            stops: ids of stop tokens.
        """
        ids = np.frombuffer(answer, "<i4")
        ends = np.flatnonzero(np.isin(ids, stops))
        count = int(ends[0]) + 1 if len(ends) else len(ids)
        self.answer = answer
        if count <= self.limit:
            self.limit, self.finish = count, "stop"
            self.stop_match = int(ids[count - 1])
