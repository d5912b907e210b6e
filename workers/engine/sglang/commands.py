"""Our commands among the requests that SGLang's scheduler receives.

Rank 0 puts the commands into its list of requests. SGLang's own broadcast sends the list to all
ranks of a replica, so every rank executes a command at the same place in its loop.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from sglrl.wire.adapters import LoraPart


@dataclass(frozen=True)
class WeightCommand:
    """Make an update live, or hold the engine for an update.

    inflight: how running requests are treated.
    hold: whether to stop the loop until the update is live.
    """

    update: int
    version: int
    inflight: str
    hold: bool


@dataclass(frozen=True)
class PauseCommand:
    """Pause the engine, resume it, or retract running requests.

    call: the id of the call that requested the command, or -1.
    mode: "in_place" and "retract" pause the engine at once. "drain" pauses it when no request runs.
        "" resumes it. "back" retracts running requests and does not pause. "wait" retracts running
        requests only if the engine is already paused.
    """

    call: int
    mode: str


@dataclass(frozen=True)
class SleepCommand:
    """Free memory, or allocate it again. See ``Sleep.change``.

    call: the id of the call that requested the command.
    """

    call: int
    asleep: tuple[str, ...]
    inflight: str
    keep_weights: bool


@dataclass(frozen=True)
class Report:
    """Reports that one request needs and SGLang itself does not make. Sent before the request.

    logprobs_mode: the mode as in ``SamplingParams``.
    mask: whether to report the tokens that could be drawn.
    temperature: the temperature at which given tokens are scored.
    """

    rid: str
    logprobs_mode: str = ""
    mask: bool = False
    temperature: float = 1.0


@dataclass(frozen=True)
class Resume:
    """The output of a request that another worker has begun. Sent before the request.

    ids: the tokens that the other worker has generated, as int64.
    """

    rid: str
    ids: array[int]


ABOUT_REQUESTS = (Report, Resume)
"""The commands that belong to the request that follows them."""


@dataclass(frozen=True)
class PrepareAdapter:
    """Prepare a LoRA adapter. See ``LoraPrepare``.

    call: the id of the call that requested the command.
    """

    call: int
    serial: int
    rank: int
    scaling: float
    parts: list[LoraPart]


@dataclass(frozen=True)
class CommitAdapter:
    """Make a prepared LoRA adapter live. See ``LoraCommit``.

    call: the id of the call that requested the command.
    uid: SGLang's id of the adapter. A new version keeps the id of the version that it replaces.
    """

    call: int
    uid: str
    serial: int
    name: str
    version: int
    inflight: str


@dataclass(frozen=True)
class DropAdapters:
    """Unload LoRA adapters that no request uses, and drop prepared LoRA adapters.

    call: the id of the call that requested the command.
    uids: SGLang's ids of the adapters to unload.
    serials: the serial numbers of the prepared adapters to drop.
    """

    call: int
    uids: list[str]
    serials: list[int]


AdapterCommand = PrepareAdapter | CommitAdapter | DropAdapters
