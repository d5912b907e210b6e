"""The interface between the mailbox and an engine, and checks that all engines share.

The mailbox calls the methods between two scheduler steps, on the scheduler's thread. The engine
answers later, through ``Mailbox.put``.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum
from typing import Any, Final, Protocol

from sglrl.errors import InvalidRequest
from sglrl.wire.adapters import LoraCommit, LoraKeep, LoraPart, LoraPrepare
from sglrl.wire.engine import (
    PAUSE_MODES,
    SLEEP_TAGS,
    EngineInfo,
    GenerateArgs,
    NextTokenArgs,
    ScoreArgs,
)


def check_top(wanted: int, vocab_size: int) -> None:
    """Raise ``InvalidRequest`` unless ``wanted`` is between 0 and the vocabulary's size."""
    if not 0 <= wanted <= vocab_size:
        raise InvalidRequest(f"cannot return the {wanted} likeliest of {vocab_size} tokens")


def check_given(token_ids: Collection[int], vocab_size: int) -> None:
    """Raise ``InvalidRequest`` unless the token ids are in the vocabulary."""
    if not all(0 <= token < vocab_size for token in token_ids):
        raise InvalidRequest(f"token_ids_logprob is outside the {vocab_size} tokens")


def check_mode(mode: str) -> None:
    """Raise ``InvalidRequest`` unless ``mode`` is one of ``PAUSE_MODES``."""
    if mode not in PAUSE_MODES:
        raise InvalidRequest(f"unknown pause mode {mode!r}; known: {', '.join(PAUSE_MODES)}")


SLEEP_MODES = ("retract", "drain", "abort")


class Later(Enum):
    """The type of ``LATER``."""

    LATER = 0


LATER: Final = Later.LATER
"""The result of a method of ``Engine.controls`` that answers its call later."""


def check_sleep(asleep: Collection[str], inflight: str) -> None:
    """Raise ``InvalidRequest`` if a tag or the mode ``inflight`` is unknown."""
    if unknown := sorted(set(asleep) - set(SLEEP_TAGS)):
        raise InvalidRequest(f"unknown tags {unknown}; known: {', '.join(SLEEP_TAGS)}")
    if inflight not in SLEEP_MODES:
        raise InvalidRequest(f"inflight must be one of {SLEEP_MODES}, got {inflight!r}")


class Engine(Protocol):
    """An engine that produces tokens.

    Invariant: for each id that ``generate``, ``score`` or ``next_token_logprobs`` accepts, the
    engine sends exactly one final item, also after ``abort``.
    """

    @property
    def controls(self) -> Any:
        """The control endpoints: an object with one method for each endpoint of the engine.

        ``sglrl/control/engine_endpoints.py`` lists the endpoints. A method takes the id of the call
        and the arguments of the endpoint. It returns the answer, or ``LATER`` if it answers through
        ``Mailbox.put_value``. ``resume`` is called with the id -1 if no call waits for its answer.

        Raises:
            InvalidRequest: a method got a wrong argument, or the engine does not support the call.
        """
        ...

    def generate(self, id_: int, args: GenerateArgs) -> None:
        """Accept a request, or raise ``InvalidRequest`` and keep no request ``id_``."""
        ...

    def score(self, id_: int, args: ScoreArgs) -> None:
        """Accept a scoring request. May raise ``InvalidRequest``."""
        ...

    def next_token_logprobs(self, id_: int, args: NextTokenArgs) -> None:
        """Accept a request for the next token's distribution. May raise ``InvalidRequest``."""
        ...

    def abort(self, id_: int) -> None:
        """Stop a request soon. Ignore an unknown id."""
        ...

    def adapters(self, id_: int, args: LoraPart | LoraPrepare | LoraCommit | LoraKeep) -> None:
        """Execute a call that concerns LoRA adapters, then answer through ``Mailbox.put_value``.

        The type of ``args`` documents the call.

        Raises:
            InvalidRequest: the engine accepts no adapters.
        """
        ...

    def info(self) -> EngineInfo:
        """Return the engine's model and limits."""
        ...
