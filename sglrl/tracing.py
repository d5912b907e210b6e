"""Spans of OpenTelemetry. This is the only module that imports OpenTelemetry, and only its API.

Tracing is off, and OpenTelemetry is never imported, unless the program has set a tracer provider
itself, runs under ``opentelemetry-instrument``, or ``$SGLRL_TRACES`` names a function that sets it.
``look_up`` searches for the provider when a client, a pool of actors or a rollout starts. Each
process has a provider of its own, or none.

Calls never fail because of a span: an exception of a sampler or a span processor is logged.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any, Final, Literal

from .config import __version__, traces_setup
from .errors import Closed, UsageError

logger = logging.getLogger("sglrl.tracing")

tracer: Any = None
"""The tracer that makes the spans. None: tracing is off."""
_offset = time.time_ns() - time.monotonic_ns()
"""The nanoseconds from the epoch to the zero of ``time.monotonic``.

All spans use this offset, so the times of a span are always within the times of its parent.
"""
_API: Final = "opentelemetry.trace"
Kind = Literal["INTERNAL", "CLIENT"]


def look_up() -> None:
    """Turn tracing on if the program has set a tracer provider. It stays on afterwards.

    Raises:
        UsageError: the function in ``$SGLRL_TRACES`` cannot be called, or has failed.
    """
    global tracer, _offset
    if tracer is not None:
        return
    _offset = time.time_ns() - time.monotonic_ns()
    tracer = _found()
    if tracer is None and (function := traces_setup()):
        _set_up(function)
        tracer = _found()


def _found() -> Any:
    """Return the tracer of this process's provider, or None."""
    # A program that has set a provider has imported this module.
    if sys.modules.get(_API) is None:
        return None
    from opentelemetry import trace

    provider = trace.get_tracer_provider()
    if isinstance(provider, (trace.ProxyTracerProvider, trace.NoOpTracerProvider)):
        return None
    found = provider.get_tracer("sglrl", __version__)
    # A disabled SDK returns a tracer that does nothing.
    return None if isinstance(found, trace.NoOpTracer) else found


@functools.cache
def _set_up(function: str) -> None:
    """Call the function "module:name" once."""
    module, _, name = function.partition(":")
    # The path of the installed command does not contain the current folder.
    if (folder := os.getcwd()) not in sys.path:
        sys.path.insert(0, folder)
    try:
        getattr(import_module(module), name)()
    except Exception as error:
        raise UsageError(
            f"SGLRL_TRACES={function} must be the module:name of a function that sets "
            f"OpenTelemetry's tracer provider: {type(error).__name__}: {error}"
        ) from error


def start(
    name: str,
    attributes: Mapping[str, Any],
    *,
    parent: Any = None,
    kind: Kind = "INTERNAL",
    at: float | None = None,
) -> Any:
    """Start a span without making it current. Return None if tracing is off.

    Args:
        attributes: the attributes that are known at the start, which samplers see.
        parent: the context with the parent (``context`` or ``under``). None: the current context.
        at: the time of the start on ``time.monotonic``. None: now.
    """
    if tracer is None:
        return None
    try:
        from opentelemetry.trace import SpanKind

        begun = _wall(at or time.monotonic())
        return tracer.start_span(name, parent, SpanKind[kind], attributes, start_time=begun)
    except Exception:
        logger.warning("the span %s could not be started", name, exc_info=True)
        return None


def end(span: Any, error: BaseException | None = None, *, at: float | None = None) -> None:
    """End a span. Do nothing if the span is None or has ended.

    Args:
        error: the exception with which the work of the span ended. A cancellation is an attribute
            of the span, not an error, and so is the end of a run or a pool (``Closed``).
        at: the time of the end on ``time.monotonic``. None: now.
    """
    if span is None or not span.is_recording():
        return
    try:
        if isinstance(error, (asyncio.CancelledError, GeneratorExit, Closed)):
            span.set_attribute("sglrl.cancelled", True)
        elif error is not None:
            from opentelemetry.trace import StatusCode

            span.record_exception(error)
            span.set_attribute("error.type", type(error).__qualname__)
            span.set_status(StatusCode.ERROR, f"{type(error).__name__}: {error}")
        span.end(_wall(at or time.monotonic()))
    except Exception:
        logger.warning("a span could not be ended", exc_info=True)


def add_event(span: Any, name: str, at: float) -> None:
    """Add an event to a span that was started, at a time on ``time.monotonic``."""
    span.add_event(name, timestamp=_wall(at))


def _wall(at: float) -> int:
    """Convert a time on ``time.monotonic`` to nanoseconds since the epoch."""
    return _offset + int(at * 1e9)


class _Block:
    """Makes a span current while a block runs, and ends it with the block."""

    __slots__ = ("_span", "_token")

    def __init__(self, span: Any) -> None:
        self._span = span
        self._token: Any = None

    def __enter__(self) -> Any:
        if self._span is not None:
            self._token = _attach(under(self._span))
        return self._span

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._token is not None:
            _detach(self._token, error)
            end(self._span, error)


class _Off:
    """A block without a span."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, *exc: object) -> None: ...


OFF: Final = _Off()
"""The block of every span while tracing is off."""


def span(name: str, attributes: Mapping[str, Any], *, kind: Kind = "INTERNAL") -> _Block | _Off:
    """Return a block that makes a new span current: ``with span("turn", {}) as made``.

    ``made`` is None if tracing is off. An exception that leaves the block is recorded. Not for
    async generators, because their consumers would run inside the block.
    """
    return OFF if tracer is None else _Block(start(name, attributes, kind=kind))


# --- contexts -------------------------------------------------------------------------------------


def context() -> Any:
    """Return the current context, as a parent of later spans. None: tracing is off."""
    if tracer is None:
        return None
    from opentelemetry.context import get_current

    return get_current()


def under(span: Any) -> Any:
    """Return a context whose current span is ``span``."""
    from opentelemetry.trace import set_span_in_context

    return set_span_in_context(span)


def headers(of: Any = None) -> dict[str, str]:
    """Return the W3C headers ``traceparent`` and ``tracestate``, or {} without a current span.

    Args:
        of: a span, in place of the current one.
    """
    made: dict[str, str] = {}
    if tracer is not None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        TraceContextTextMapPropagator().inject(made, None if of is None else under(of))
    return made


@contextmanager
def within(headers: Mapping[str, str], other: Any = None) -> Iterator[None]:
    """Run a block in the context that a peer has sent (``headers``).

    Without a valid ``traceparent``, the spans in the block have no parent, except ``other``. The
    block has no effect if this process does not use OpenTelemetry.

    Args:
        headers: the headers of a request or of a call.
        other: a context to use in place of a missing ``traceparent``.
    """
    # An actor may have set its provider after ``look_up``, and its own spans need the context.
    if sys.modules.get(_API) is None:
        yield
        return
    token = _attach(_extracted(headers, other))
    try:
        yield
    finally:
        _detach(token, sys.exception())


def _extracted(headers: Mapping[str, str], other: Any) -> Any:
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
    return TraceContextTextMapPropagator().extract(carrier, Context() if other is None else other)


def _attach(context: Any) -> Any:
    from opentelemetry.context import attach

    return attach(context)


def _detach(token: Any, error: BaseException | None) -> None:
    from opentelemetry.context import detach

    # A coroutine that is closed (GeneratorExit) runs in another context than before.
    if not isinstance(error, GeneratorExit):
        detach(token)


def flush(seconds: float) -> None:
    """Let the provider export the spans that have ended, for at most this time.

    Worker processes call it before they exit, because they run no ``atexit`` functions.
    """
    if sys.modules.get(_API) is None:
        return
    from opentelemetry.trace import get_tracer_provider

    force_flush = getattr(get_tracer_provider(), "force_flush", None)
    if force_flush is not None:
        # A hanging exporter does not end the thread.
        thread = threading.Thread(target=force_flush, name="sglrl-flush", daemon=True)
        thread.start()
        thread.join(seconds)
