"""The interface of an engine.

The mailbox calls the methods between two scheduler steps, on the scheduler's thread. The engine
answers later, through ``Mailbox.put``.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol

from sglrl.errors import InvalidRequest
from sglrl.wire.adapters import LoraCommit, LoraKeep, LoraPart, LoraPrepare
from sglrl.wire.engine import (
    PAUSE_MODES,
    SLEEP_TAGS,
    EngineInfo,
    EngineStats,
    GenerateArgs,
    NextTokenArgs,
    ProfileArgs,
    ScoreArgs,
    SleepArgs,
    TensorValue,
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


def check_sleep(args: SleepArgs) -> None:
    """Raise ``InvalidRequest`` unless ``args`` has known tags and one of ``SLEEP_MODES``."""
    if unknown := sorted(set(args.asleep) - set(SLEEP_TAGS)):
        raise InvalidRequest(f"unknown tags {unknown}; known: {', '.join(SLEEP_TAGS)}")
    if args.inflight not in SLEEP_MODES:
        raise InvalidRequest(f"inflight must be one of {SLEEP_MODES}, got {args.inflight!r}")


class Engine(Protocol):
    """An engine that produces tokens.

    Invariant: the engine answers every id that ``generate``, ``score`` or ``next_token_logprobs``
    accepts exactly once with a final item, also after ``abort``.
    """

    def generate(self, id_: int, args: GenerateArgs) -> None:
        """Accept a request. After an ``InvalidRequest``, the engine holds no request ``id_``."""
        ...

    def score(self, id_: int, args: ScoreArgs) -> None:
        """Accept a scoring request. May raise ``InvalidRequest``."""
        ...

    def next_token_logprobs(self, id_: int, args: NextTokenArgs) -> None:
        """Accept a request for the next token's distribution. May raise ``InvalidRequest``."""
        ...

    def abort(self, id_: int) -> None:
        """Stop a request soon. Unknown ids are ignored."""
        ...

    def abort_all(self) -> int:
        """Stop all requests of ``generate`` soon.

        Each request is answered with its tokens so far and the finish reason "abort".

        Returns:
            The number of these requests.
        """
        ...

    def pause(self, id_: int, mode: str) -> None:
        """Stop making steps, then answer through ``Mailbox.put_value``.

        Args:
            mode: see ``PauseArgs``.

        Raises:
            InvalidRequest: the mode is unknown.
        """
        ...

    def resume(self, id_: int) -> None:
        """Make steps again after ``pause``, then answer through ``Mailbox.put_value``."""
        ...

    def sleep(self, id_: int, args: SleepArgs) -> None:
        """Give memory back or take it again, then answer None through ``Mailbox.put_value``.

        Raises:
            InvalidRequest: a tag or the mode is unknown, or the engine does not support it.
        """
        ...

    def adapters(self, id_: int, args: LoraPart | LoraPrepare | LoraCommit | LoraKeep) -> None:
        """Execute a call that concerns LoRA adapters, then answer through ``Mailbox.put_value``.

        The type of ``args`` documents the call.

        Raises:
            InvalidRequest: the engine takes no adapters.
        """
        ...

    def flush_cache(self, id_: int) -> None:
        """Empty the prefix cache, then answer True through ``Mailbox.put_value``.

        While requests run, the engine keeps the cache and answers False.
        """
        ...

    def stats(self) -> EngineStats:
        """Return the engine's load and counters."""
        ...

    def server_info(self) -> dict[str, Any]:
        """Return the engine's arguments and limits as plain values."""
        ...

    def start_profile(self, id_: int, args: ProfileArgs) -> None:
        """Start the profiler, then answer [] through ``Mailbox.put_value``.

        Raises:
            InvalidRequest: the engine has no profiler.
        """
        ...

    def stop_profile(self, id_: int) -> None:
        """Stop the profiler, then answer the paths of its files through ``Mailbox.put_value``."""
        ...

    def get_weights(self, names: list[str]) -> list[TensorValue]:
        """Return copies of live tensors.

        Raises:
            InvalidRequest: the engine cannot return a tensor of such a name.
        """
        ...

    def info(self) -> EngineInfo:
        """Return the engine's model and limits."""
        ...
