"""Messages between a run and its processes (``agent_processes.py``, ``agent_worker.py``)."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import msgspec

from ..config import GatewayOptions
from ..errors import DRIVER_ERRORS, RemoteError, SglrlError
from ..inference.sampling import SamplingParams
from ..sessions.record import Record
from ..wire.calls import ErrorBody
from ..wire.codec import readable
from ..wire.processes import PoolEntry
from .agent import Agent

DONE: Final = "done"
FAILED: Final = "failed"
LATE: Final = "late"
STALE: Final = "stale"
_OWN: Final = "sglrl."
"""Prefix for the names of sglrl's own errors. Classes of other packages may have equal names."""


class Settings(NamedTuple):
    """All settings that the processes of one run need. They are pickled for their fork server.

    The fields without a description are those of the run and its client.

    Attributes:
        driver: process id of the driver.
        call_timeout: seconds that each call of the client may take; None: no limit.
    """

    driver: int
    entry: PoolEntry
    model: str
    call_timeout: float | None
    agent: Agent | type[Any]
    timeout: float | None
    max_staleness: int | None
    session: dict[str, Any]
    gateway: bool | GatewayOptions = False


class Outcome(msgspec.Struct, array_like=True, frozen=True):
    """The result of one sample, and statistics of turns.

    The statistics cover all turns that have finished in this process since its previous outcome,
    of any sample.

    Attributes:
        how: DONE, FAILED, LATE or STALE. DONE comes with ``trajectory`` and ``oldest``; FAILED and
            LATE come with ``error``.
        turns: number of turns.
        prompt_bytes: bytes of their prompts.
        cached_tokens: prompt tokens that came from the prefix cache.
        new_bytes: bytes of their new tokens.
        oldest: ``oldest_versions`` of the trajectory.
        refused: the sample failed because the pool accepts no more calls.
        cut_off: the sample failed because this process has lost its connection to the pool.
        fatal: the run must end.
        hangs_at: stack of an agent that continued after its cancellation. The sample finished
            without this agent.
    """

    how: str
    turns: int
    prompt_bytes: int
    cached_tokens: int
    new_bytes: int
    trajectory: Record | None = None
    oldest: dict[str, int] = {}
    error: ErrorBody | None = None
    refused: bool = False
    cut_off: bool = False
    fatal: bool = False
    hangs_at: str = ""


def body_of(error: Exception) -> ErrorBody:
    """Encode an error under a name that the driver knows, so that the driver can decide on retries.

    Errors of other packages get a traceback, which shows their origin.
    """
    for cls in type(error).__mro__:
        if DRIVER_ERRORS.get(cls.__name__) is cls:
            return ErrorBody(_OWN + cls.__name__, readable(error))
    trace = "".join(traceback.format_exception(error))
    return ErrorBody(type(error).__name__, readable(error), readable(trace))


def error_from(body: ErrorBody) -> SglrlError:
    """Decode an error: sglrl's own errors as their class, all others as a ``RemoteError``."""
    known = DRIVER_ERRORS.get(body.kind.removeprefix(_OWN)) if body.kind.startswith(_OWN) else None
    if known is not None:
        return known(body.message)
    kind = body.kind
    return RemoteError(f"{kind}: {body.message}", kind=kind, traceback=body.traceback)


def sampling_to(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Prepare a session's arguments for a message: replace ``SamplingParams`` by its fields."""
    sampling = arguments.get("sampling")
    if isinstance(sampling, SamplingParams):
        return {**arguments, "sampling": msgspec.structs.asdict(sampling)}
    return dict(arguments)


def sampling_from(arguments: Mapping[str, Any]) -> dict[str, Any]:
    sampling = arguments.get("sampling")
    if isinstance(sampling, dict):
        return {**arguments, "sampling": SamplingParams(**sampling)}
    return dict(arguments)
