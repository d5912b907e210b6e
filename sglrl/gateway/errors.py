"""Convert exceptions to the HTTP errors that a client of the gateway receives."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence

from ..errors import (
    Closed,
    ContextFull,
    DeadlineExceeded,
    EngineError,
    InvalidRequest,
    MessageTooLarge,
    Overloaded,
    UnknownAdapter,
    UsageError,
    WeightUpdateError,
    WorkerLost,
)

logger = logging.getLogger("sglrl.gateway")

_QUOTED = re.compile(r"""('[^']*'|"[^"]*")""")

RETRY_SECONDS = 1
"""Seconds after which a client may retry a request that was answered with status 429."""
_STATUS: Sequence[tuple[type[Exception], int, str]] = (
    (MessageTooLarge, 413, "invalid_request_error"),
    (UnknownAdapter, 404, "invalid_request_error"),
    (UsageError, 400, "invalid_request_error"),
    (Overloaded, 429, "rate_limit_error"),
    (DeadlineExceeded, 504, "server_error"),
    (EngineError, 500, "server_error"),
    (WeightUpdateError, 503, "server_error"),
    (WorkerLost, 503, "server_error"),
    (Closed, 503, "server_error"),
)


class HttpError(Exception):
    """An error that the client receives.

    Args:
        status: the HTTP status.
        message: the text of the error.
        kind: the value of OpenAI's ``error.type``.
        code: the value of OpenAI's ``error.code``.
    """

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.code = code


def error_of(error: Exception) -> HttpError:
    """Return the HTTP error that a client receives for an exception."""
    if isinstance(error, HttpError):
        return error
    for type_, status, kind in _STATUS:
        if isinstance(error, type_):
            full = isinstance(error, ContextFull)
            code = "context_length_exceeded" if full else None
            if isinstance(error, UnknownAdapter):
                code = "model_not_found"
            # Some messages end with the name of a Python method, which a client cannot call.
            message = str(error).partition("; see Session.")[0].partition("; use load_lora")[0]
            if full:
                # Clients of SGLang look for these words.
                message += ". The prompt is longer than the model's context length"
            return HttpError(status, message, kind, code)
    logger.error("a request failed", exc_info=error)
    return HttpError(500, "internal error; the log of the gateway has its stack", "server_error")


def named(error: Exception, names: Mapping[str, str]) -> Exception:
    """Return an error whose message names the fields as the client wrote them.

    The dialects give sampling parameters our names. Only these names are replaced. The values in a
    message come after "got" or are in quotation marks, and are not changed.

    Args:
        error: the error with our names.
        names: the client's name for each of our names.
    """
    if not names or type(error) is not InvalidRequest:
        return error
    what, got, value = str(error).partition(", got ")
    pattern = re.compile(rf"\b({'|'.join(map(re.escape, names))})\b")
    parts = _QUOTED.split(what)
    # Every second part is in quotation marks.
    parts[::2] = [pattern.sub(lambda match: names[match[1]], part) for part in parts[::2]]
    made = InvalidRequest("".join(parts) + got + value)
    made.__cause__ = error
    return made
