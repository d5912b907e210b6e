"""Commands of ours among the requests that SGLang's scheduler receives.

Rank 0 puts them into its list of requests, and SGLang's own broadcast brings them to all ranks of a
replica, so every rank executes them at the same place in its loop.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from sglrl.wire.adapters import LoraPart


@dataclass(frozen=True)
class WeightCommand:
    """Make an update live, or hold the engine for it.

    inflight: what happens to running requests.
    hold: stop the loop until the update is live.
    """

    update: int
    version: int
    inflight: str
    hold: bool


@dataclass(frozen=True)
class PauseCommand:
    """Pause the engine, resume it, or retract running requests.

    call: the call that asked for it; -1: none.
    mode: "in_place" or "retract" pause the engine, "drain" when no request runs; "" resumes it.
        Two modes pause nothing: "back" retracts running requests; "wait" does so in an engine that
        is paused by then.
    """

    call: int
    mode: str


@dataclass(frozen=True)
class SleepCommand:
    """Give memory back, or take it again. See ``SleepEndpoints``.

    call: the call that asked for it.
    """

    call: int
    asleep: tuple[str, ...]
    inflight: str
    keep_weights: bool


@dataclass(frozen=True)
class Report:
    """What a request reports about its tokens beside SGLang's own, sent before the request.

    logprobs_mode: as in ``SamplingParams``.
    mask: report the tokens that could be drawn.
    temperature: the temperature of the scores of given tokens.
    """

    rid: str
    logprobs_mode: str = ""
    mask: bool = False
    temperature: float = 1.0


@dataclass(frozen=True)
class Resume:
    """The output of a request that another worker has begun, sent before the request itself.

    ``ids``: int64, the tokens that the other worker has generated.
    """

    rid: str
    ids: array[int]


ABOUT_REQUESTS = (Report, Resume)
"""Commands that belong to the request that follows them."""


@dataclass(frozen=True)
class PrepareAdapter:
    """Prepare an adapter. See ``LoraPrepare``.

    call: the call that asked for it.
    """

    call: int
    serial: int
    rank: int
    scaling: float
    parts: list[LoraPart]


@dataclass(frozen=True)
class CommitAdapter:
    """Make a prepared adapter live. See ``LoraCommit``.

    call: the call that asked for it.
    uid: SGLang's id of the adapter. A new version has the id of the version that it replaces.
    """

    call: int
    uid: str
    serial: int
    name: str
    version: int
    inflight: str


@dataclass(frozen=True)
class DropAdapters:
    """Unload adapters that no request uses, and give up preparations.

    call: the call that asked for it.
    uids: SGLang's ids of the adapters.
    serials: the preparations.
    """

    call: int
    uids: list[str]
    serials: list[int]


AdapterCommand = PrepareAdapter | CommitAdapter | DropAdapters
