"""Every error sglrl raises, in one tree.

::

    SglrlError
    ├── UsageError (ValueError)        the call is wrong; nothing was sent
    │   ├── InvalidRequest             a prompt, token id or sampling value is wrong
    │   ├── UnknownEndpoint            the actor declares no endpoint of that name
    │   ├── MessageTooLarge            the arguments do not fit in one message
    │   ├── ModelError                 the model folder is missing or unreadable
    │   ├── InvalidKeys                a CURVE key file is missing, malformed or open to others
    │   ├── NotEnoughDevices           fewer GPUs than replicas * tp_size
    │   └── InvalidWeights             they do not fit the model, are not finite, or no room
    ├── Overloaded                     the driver's queue is full; try again later
    ├── DeadlineExceeded (TimeoutError)
    ├── RemoteError                    an exception inside the actor, with its traceback
    ├── RolloutFailed                  nearly all samples of a rollout failed lately
    ├── EngineError                    the engine gave up on a request that was well formed
    ├── WeightUpdateError              an update was given up; every worker has its old weights
    │   ├── SettingsMismatch           sender and worker could not form a group: a setting differs
    │   └── UpdateInProgress           another update or copy is running; nothing was begun
    ├── WorkerError
    │   ├── WorkerStartError           a worker died, or said no, before it was ready
    │   └── WorkerLost                 a worker died while it held the call
    ├── ProtocolError                  a peer sent something that is not our protocol
    └── Closed                         the pool, client or stream is already closed

``UsageError`` is the caller's to fix, ``RemoteError`` the actor's author's, ``WorkerError`` and
``EngineError`` the operator's. Every error survives ``pickle`` with its attributes.
"""

from __future__ import annotations

from typing import Any, Final

__all__ = [
    "Closed",
    "DeadlineExceeded",
    "EngineError",
    "InvalidKeys",
    "InvalidRequest",
    "InvalidWeights",
    "MessageTooLarge",
    "ModelError",
    "NotEnoughDevices",
    "Overloaded",
    "ProtocolError",
    "RemoteError",
    "RolloutFailed",
    "SettingsMismatch",
    "SglrlError",
    "UnknownEndpoint",
    "UpdateInProgress",
    "UsageError",
    "WeightUpdateError",
    "WorkerError",
    "WorkerLost",
    "WorkerStartError",
]


def _rebuild(cls: type[SglrlError], message: str, fields: dict[str, Any]) -> SglrlError:
    error = cls.__new__(cls)
    Exception.__init__(error, message)
    error.message = message
    error.__dict__.update(fields)
    return error


class SglrlError(Exception):
    """Root of the tree. ``message`` says what happened and what to do about it."""

    message: str

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, dict(self.__dict__))


class UsageError(SglrlError, ValueError):
    """The call is wrong as written. Nothing was sent and no worker was touched."""


class InvalidRequest(UsageError):
    """A prompt, token id, sampling value, regex, grammar or schema cannot be served."""


class UnknownEndpoint(UsageError, AttributeError):
    """The actor declares no endpoint of that name."""


class MessageTooLarge(UsageError):
    """The arguments (or a result) exceed ``max_message_bytes``."""


class ModelError(UsageError):
    """The model folder does not exist, or a file in it cannot be read."""


class InvalidKeys(UsageError):
    """A file of CURVE keys is missing, holds no key, or can be read or changed by others."""


class NotEnoughDevices(UsageError):
    """Fewer GPUs are visible than ``replicas * tp_size`` asks for."""


class InvalidWeights(UsageError):
    """An update does not fit the loaded model (unknown, missing, mis-shaped or mis-typed tensors),
    some value is NaN, infinite or too large for the engine's dtype, or there is no room. Every
    worker that serves has the weights it had before."""


class WeightUpdateError(SglrlError):
    """A weight update was given up. Every worker that serves has the weights it had before."""


class SettingsMismatch(WeightUpdateError):
    """Two processes that are to exchange weights differ in something that must agree: a version of
    torch or NCCL, or a variable of NCCL. Collectives between them would fail or hang."""


class UpdateInProgress(WeightUpdateError):
    """Another weight update, or the copy of the weights to a new worker, is running. It did not end
    within the caller's timeout, or the caller was not to wait for it. Nothing has begun."""


class Overloaded(SglrlError):
    """The driver's bounded queue is full. Nothing was sent; submit again when calls return."""


class DeadlineExceeded(SglrlError, TimeoutError):
    """The deadline passed before the answer came. The work was aborted at the worker."""


class RemoteError(SglrlError):
    """An endpoint raised.

    Attributes:
        kind: the remote exception's class name.
        traceback: the remote traceback as text.
    """

    kind: str
    traceback: str

    def __init__(self, message: str, *, kind: str = "Exception", traceback: str = "") -> None:
        super().__init__(message)
        self.kind = kind
        self.traceback = traceback

    def __str__(self) -> str:
        if not self.traceback:
            return self.message
        return f"{self.message}\n\nRemote traceback:\n{self.traceback.rstrip()}"


class RolloutFailed(SglrlError):
    """Of the latest attempts of a rollout more than ``max_failure_rate`` failed. The message has
    the rate and the most frequent error; ``__cause__`` is the latest one."""


class EngineError(SglrlError):
    """The engine aborted a request that was well formed: its own queue limit, a fault, or a model
    whose logits are NaN or infinite."""


NOT_FINITE: Final = (
    "the model's logits are not finite (NaN or infinite), so they say nothing of the next token: "
    "see whether it has diverged (weights version {})"
)
"""Of an ``EngineError``, for the version that made them."""


class WorkerError(SglrlError):
    """A worker process is the problem.

    Attributes:
        worker: the worker's index in its pool.
    """

    worker: int

    def __init__(self, message: str, *, worker: int = -1) -> None:
        super().__init__(message)
        self.worker = worker


class WorkerStartError(WorkerError):
    """A worker ended before it was ready.

    Attributes:
        output: the last lines the worker wrote to stdout and stderr.
    """

    output: str

    def __init__(self, message: str, *, worker: int = -1, output: str = "") -> None:
        super().__init__(message, worker=worker)
        self.output = output

    def __str__(self) -> str:
        if not self.output:
            return self.message
        return f"{self.message}\n\nLast output of the worker:\n{self.output.rstrip()}"


class WorkerLost(WorkerError):
    """A worker died while it held the call, and the call could not be moved to another one."""


class ProtocolError(SglrlError):
    """A peer sent frames that are not this protocol, or of another version."""


class Closed(SglrlError):
    """The pool, client or stream is already closed."""


WIRE_ERRORS: Final[dict[str, type[SglrlError]]] = {
    cls.__name__: cls
    for cls in (
        InvalidRequest,
        UnknownEndpoint,
        MessageTooLarge,
        EngineError,
        UsageError,
        InvalidWeights,
        SettingsMismatch,
        UpdateInProgress,
        WeightUpdateError,
    )
}
"""Errors a worker may answer with by name; anything else arrives as ``RemoteError``."""


DRIVER_ERRORS: Final[dict[str, type[SglrlError]]] = {
    **WIRE_ERRORS,
    **{
        cls.__name__: cls
        for cls in (Closed, DeadlineExceeded, ModelError, Overloaded, ProtocolError, WorkerLost)
    },
}
"""Errors that a driver may answer a client in another process with, by name."""


def from_wire(kind: str, message: str, traceback: str) -> SglrlError:
    """The exception for an error message that a worker sent."""
    cls = WIRE_ERRORS.get(kind)
    if cls is not None:
        return cls(message)
    return RemoteError(f"{kind}: {message}", kind=kind, traceback=traceback)
