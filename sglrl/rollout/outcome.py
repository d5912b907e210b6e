"""What the processes of a run are told, and what they tell of a sample (``processes.py``,
``host.py``)."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import msgspec

from ..codec import readable
from ..errors import DRIVER_ERRORS, SglrlError, from_wire
from ..messages import ClientKeys, ErrorBody
from ..sampling import SamplingParams
from .play import Agent
from .trajectory import Record

DONE: Final = "done"
FAILED: Final = "failed"
LATE: Final = "late"
STALE: Final = "stale"


class Settings(NamedTuple):
    """All that the processes of one run need; pickled, for their fork server. ``address``, ``keys``
    and ``insecure`` as in ``sglrl.connect``; the others are those of the run."""

    address: str
    keys: ClientKeys | None
    insecure: bool
    model: str
    call_timeout: float | None
    agent: Agent | type[Any]
    open_session: Callable[[Any], Mapping[str, Any]]
    timeout: float | None
    max_staleness: int | None
    sampling: SamplingParams | None
    values: dict[str, Any]


class Outcome(msgspec.Struct, array_like=True, frozen=True):
    """What one sample has come to. Bytes and cached tokens are sums over its turns.

    ``how``: DONE (then there is a ``trajectory``, and ``oldest`` is its oldest version), FAILED and
    LATE (then there is an ``error``), or STALE. ``refused``: it failed because the pool takes no
    calls any more. ``hopeless``: so would any other.
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
    hopeless: bool = False


def body_of(error: Exception) -> ErrorBody:
    """By the name that the driver knows it by: it tells apart what is to be tried again. Of what is
    not sglrl's own the traceback says where it comes from."""
    known = next(
        (c.__name__ for c in type(error).__mro__ if DRIVER_ERRORS.get(c.__name__) is c), ""
    )
    if known:
        return ErrorBody(known, readable(error))
    trace = "".join(traceback.format_exception(error))
    return ErrorBody(type(error).__name__, readable(error), readable(trace))


def error_from(body: ErrorBody) -> SglrlError:
    """As it was in the process, if it is sglrl's own."""
    known = DRIVER_ERRORS.get(body.kind)
    return known(body.message) if known else from_wire(body.kind, body.message, body.traceback)
