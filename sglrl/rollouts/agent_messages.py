"""The messages between the driver of a run and the processes that run its agents.

``agent_processes.py`` is the driver's side, and ``agent_worker.py`` runs in the processes.
"""

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
"""A prefix for the names of sglrl's errors. Other packages may have errors of the same name."""


class Settings(NamedTuple):
    """The settings that the processes of one run need. They are pickled for the fork server.

    Fields without a description here are arguments of ``rollout`` or values of its client.

    Attributes:
        driver: the process id of the driver.
        call_timeout: the client's time limit for each call in seconds. None: no limit.
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

    The statistics cover every turn, of any sample, that has finished in this process since its
    previous outcome.

    Attributes:
        how: DONE, FAILED, LATE or STALE. DONE comes with ``trajectory`` and ``oldest``. FAILED and
            LATE come with ``error``.
        turns: the number of finished turns.
        prompt_bytes: the size of their prompts in bytes.
        cached_tokens: the number of their prompt tokens that came from the prefix cache.
        new_bytes: the size of their sampled tokens in bytes.
        oldest: ``oldest_versions`` of the trajectory.
        refused: whether the sample failed because the pool accepts no more calls.
        cut_off: whether the sample failed because this process has lost its connection to the pool.
        fatal: whether the run must end.
        hangs_at: the stack of an agent that continued after its cancellation, or "". The sample
            finished without this agent.
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
    """Encode an error for the driver.

    The driver restores errors of sglrl with their class, because retries depend on the class. Other
    errors are sent with a traceback, which shows their origin.
    """
    for cls in type(error).__mro__:
        if DRIVER_ERRORS.get(cls.__name__) is cls:
            return ErrorBody(_OWN + cls.__name__, readable(error))
    trace = "".join(traceback.format_exception(error))
    return ErrorBody(type(error).__name__, readable(error), readable(trace))


def error_from(body: ErrorBody) -> SglrlError:
    """Decode an error. Errors of sglrl get their own class, and others become ``RemoteError``."""
    known = DRIVER_ERRORS.get(body.kind.removeprefix(_OWN)) if body.kind.startswith(_OWN) else None
    if known is not None:
        return known(body.message)
    kind = body.kind
    return RemoteError(f"{kind}: {body.message}", kind=kind, traceback=body.traceback)


def sampling_to(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Prepare the arguments of a session for a message: replace ``SamplingParams`` by a dict."""
    sampling = arguments.get("sampling")
    if isinstance(sampling, SamplingParams):
        return {**arguments, "sampling": msgspec.structs.asdict(sampling)}
    return dict(arguments)


def sampling_from(arguments: Mapping[str, Any]) -> dict[str, Any]:
    sampling = arguments.get("sampling")
    if isinstance(sampling, dict):
        return {**arguments, "sampling": SamplingParams(**sampling)}
    return dict(arguments)
