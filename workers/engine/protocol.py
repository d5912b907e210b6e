"""What an engine offers to the fabric. The mailbox calls these between two scheduler steps, on the
scheduler's own thread; an engine answers later, through ``Mailbox.put``."""

from __future__ import annotations

from typing import Protocol

from sglrl.errors import InvalidRequest
from sglrl.wire.engine import EngineInfo, EngineStats, GenerateArgs, NextTokenArgs, ScoreArgs


def check_top(wanted: int, vocab_size: int) -> None:
    """Raises ``InvalidRequest`` unless a vocabulary has so many likeliest tokens."""
    if not 0 <= wanted <= vocab_size:
        raise InvalidRequest(f"there are no {wanted} likeliest of {vocab_size} tokens")


PAUSE_MODES = ("in_place", "retract", "abort")


def check_mode(mode: str) -> None:
    """Raises ``InvalidRequest`` unless it is a mode of pausing."""
    if mode not in PAUSE_MODES:
        raise InvalidRequest(f"there is no mode {mode!r} of pausing: {', '.join(PAUSE_MODES)}")


class Engine(Protocol):
    """Invariant: every id taken by ``generate``, ``score`` or ``next_token_logprobs`` is answered
    exactly once with a final item, also after ``abort``."""

    def generate(self, id_: int, args: GenerateArgs) -> None:
        """Take a request in. May raise ``InvalidRequest``: then nothing was taken."""
        ...

    def score(self, id_: int, args: ScoreArgs) -> None:
        """Take a scoring request in. May raise ``InvalidRequest``."""
        ...

    def next_token_logprobs(self, id_: int, args: NextTokenArgs) -> None:
        """Take a request for the next token's distribution in. May raise ``InvalidRequest``."""
        ...

    def abort(self, id_: int) -> None:
        """Stop a request soon; unknown ids are ignored."""
        ...

    def abort_all(self) -> int:
        """Stop all requests taken by ``generate`` soon; they are answered with what they have, and
        the finish reason "abort". How many they are."""
        ...

    def pause(self, id_: int, mode: str) -> None:
        """Make no further step; answered through ``Mailbox.put_value`` when that is so. ``mode`` as
        in ``PauseArgs``. May raise ``InvalidRequest``."""
        ...

    def resume(self, id_: int) -> None:
        """Go on after ``pause``. Answered as that is."""
        ...

    def flush_cache(self, id_: int) -> None:
        """Empty the prefix cache and answer True; False when requests are running, and nothing was
        done. Answered through ``Mailbox.put_value``."""
        ...

    def stats(self) -> EngineStats: ...

    def info(self) -> EngineInfo: ...
