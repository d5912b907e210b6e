"""What a client of the gateway gets for an error."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence

from ..errors import (
    Closed,
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
"""After status 429."""
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
    """An error that the client gets.

    Args:
        status: of HTTP.
        kind: OpenAI's ``error.type``.
        code: OpenAI's ``error.code``.
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
    """Return what a client gets for an error of ours."""
    if isinstance(error, HttpError):
        return error
    for type_, status, kind in _STATUS:
        if isinstance(error, type_):
            full = str(error).startswith("the context is full")
            code = "context_length_exceeded" if full else None
            if isinstance(error, UnknownAdapter):
                code = "model_not_found"
            # The end of some messages names methods of Python.
            message = str(error).partition("; see Session.")[0].partition("; use load_lora")[0]
            if full:
                # Clients of SGLang look for these words.
                message += ". The prompt is longer than the model's context length"
            return HttpError(status, message, kind, code)
    logger.error("a request failed", exc_info=error)
    return HttpError(500, "internal error; the log of the gateway has its stack", "server_error")


def named(error: Exception, names: Mapping[str, str]) -> Exception:
    """Return an error that names the fields as the client wrote them.

    Sampling parameters have names of their own behind the dialects. The values in the error, which
    come after "got" or in quotation marks, are not changed.

    Args:
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
