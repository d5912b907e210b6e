"""Call the control endpoints of the engines, on all workers or on one worker."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any, Final

from msgspec import Raw

from ..actors.actor import EndpointSpec, deadline_from
from ..actors.replies import UnaryReply
from ..core.calls import Call
from ..driver.driver import Driver
from ..errors import Closed, WorkerLost

_FIRST: Final = 1 << 62
"""Priority of control calls, which are sent to a worker before all other calls."""


async def ask_all(
    driver: Driver,
    spec: EndpointSpec,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    timeout: float | None = None,
    worker: int | None = None,
) -> dict[int, Any]:
    """Call a control endpoint on all workers that serve, or on one worker, concurrently.

    Args:
        worker: call only this worker. None: all workers that serve.

    Returns:
        The answers by worker index, in worker order. With ``worker=None``, workers that are lost
        during the call are left out.
    """
    workers = driver.ready if worker is None else [worker]
    calls, futures = [], []
    for index in workers:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        calls.append(_control(spec, args, kwargs or {}, index, future, timeout))
        futures.append(future)
    results = await driver.submit_all(calls, futures, return_exceptions=worker is None)
    answers = {}
    for index, one in zip(workers, results, strict=True):
        if not isinstance(one, BaseException):
            answers[index] = one
        elif not isinstance(one, WorkerLost):
            raise one
    return answers


def tell(driver: Driver, spec: EndpointSpec, args: tuple[Any, ...], worker: int) -> None:
    """Call a control endpoint on a worker without waiting for the answer.

    A lost worker is ignored, because its replacement receives the call when it starts to serve.
    """
    future = driver.loop.create_future()
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    with contextlib.suppress(Closed, WorkerLost):
        driver.submit(_control(spec, args, {}, worker, future, None))


def _control(
    spec: EndpointSpec,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    worker: int,
    future: asyncio.Future[Any],
    timeout: float | None,
) -> Call:
    body, _ = spec.arguments.encode(args, kwargs)
    return urgent_call(spec, Raw(body), worker, future, timeout)


def urgent_call(
    spec: EndpointSpec,
    body: Raw,
    worker: int,
    future: asyncio.Future[Any],
    timeout: float | None,
    frames: Sequence[memoryview] = (),
) -> Call:
    """Make a call that is sent to one worker at once, even if the worker holds many calls.

    Args:
        body: the encoded arguments.
        frames: the raw frames of the call.
    """
    return Call(
        spec.name,
        body,
        UnaryReply(future, spec.result),
        frames,
        deadline_from(timeout),
        priority=_FIRST,
        pinned=worker,
        idempotent=spec.idempotent,
        urgent=True,
    )
