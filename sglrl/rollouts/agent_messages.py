"""What the processes of a run are told, and what they tell of a sample (``agent_processes.py``,
``agent_worker.py``)."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import msgspec

from ..errors import DRIVER_ERRORS, RemoteError, SglrlError
from ..inference.sampling import SamplingParams
from ..sessions.trajectory import Record
from ..wire.calls import ErrorBody
from ..wire.codec import readable
from ..wire.processes import ClientKeys
from .agent import Agent

DONE: Final = "done"
FAILED: Final = "failed"
LATE: Final = "late"
STALE: Final = "stale"
_OWN: Final = "sglrl."
"""Before the names of its own errors: others may have classes of these names."""


class Settings(NamedTuple):
    """All that the processes of one run need; pickled, for their fork server. ``driver``: its
    process id. ``address``, ``keys``, ``insecure`` and ``heartbeat_timeout`` as in
    ``sglrl.connect``; the others are those of the run and its client."""

    driver: int
    max_message_bytes: int
    address: str
    keys: ClientKeys | None
    insecure: bool
    heartbeat_timeout: float | None
    model: str
    call_timeout: float | None
    agent: Agent | type[Any]
    timeout: float | None
    max_staleness: int | None
    sampling: SamplingParams | None
    values: dict[str, Any]

    def __repr__(self) -> str:
        # The address and the keys hold secrets.
        return f"<Settings of a run with {self.model}>"


class Outcome(msgspec.Struct, array_like=True, frozen=True):
    """What one sample has come to; and the turns that have ended in its process since the last one
    had, of whatever sample: how many, and bytes and cached tokens of all.

    ``how``: DONE (then there is a ``trajectory``, and ``oldest`` is its oldest version), FAILED and
    LATE (then there is an ``error``), or STALE. ``refused``: it failed because the pool takes no
    calls any more; ``cut_off``: because this process's connection to it is lost. ``fatal``: the run
    is to end. ``hangs_at``: the stack of an agent that went on after its cancellation, and that the
    sample was ended without.
    """

    how: str
    turns: int
    prompt_bytes: int
    cached_tokens: int
    new_bytes: int
    trajectory: Record | None = None
    oldest: int = -1
    error: ErrorBody | None = None
    refused: bool = False
    cut_off: bool = False
    fatal: bool = False
    hangs_at: str = ""


def body_of(error: Exception) -> ErrorBody:
    """By the name that the driver knows it by: it tells apart what is to be tried again. Of what is
    not sglrl's own the traceback says where it comes from."""
    for cls in type(error).__mro__:
        if DRIVER_ERRORS.get(cls.__name__) is cls:
            return ErrorBody(_OWN + cls.__name__, readable(error))
    trace = "".join(traceback.format_exception(error))
    return ErrorBody(type(error).__name__, readable(error), readable(trace))


def error_from(body: ErrorBody) -> SglrlError:
    """As it was in the process, if it is sglrl's own; any other as a ``RemoteError``."""
    known = DRIVER_ERRORS.get(body.kind.removeprefix(_OWN)) if body.kind.startswith(_OWN) else None
    if known is not None:
        return known(body.message)
    kind = body.kind
    return RemoteError(f"{kind}: {body.message}", kind=kind, traceback=body.traceback)


def sampling_to(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a session, to be sent: ``SamplingParams`` as a mapping of its fields."""
    sampling = arguments.get("sampling")
    if isinstance(sampling, SamplingParams):
        return {**arguments, "sampling": msgspec.structs.asdict(sampling)}
    return dict(arguments)


def sampling_from(arguments: Mapping[str, Any]) -> dict[str, Any]:
    sampling = arguments.get("sampling")
    if isinstance(sampling, dict):
        return {**arguments, "sampling": SamplingParams(**sampling)}
    return dict(arguments)
