"""All errors that sglrl raises, as one tree.

::

    SglrlError
    ├── UsageError (ValueError)        the call is wrong and was not sent
    │   ├── InvalidRequest             a prompt, token id or sampling value is wrong
    │   │   ├── ContextFull                no token fits after the prompt of a turn
    │   │   └── UnknownAdapter         no adapter of this name is loaded, or it was unloaded
    │   ├── UnknownEndpoint            the actor declares no endpoint of that name
    │   ├── MessageTooLarge            the arguments do not fit in one message
    │   ├── ModelError                 the model folder is missing or unreadable
    │   ├── InvalidKeys                a CURVE key file is missing, malformed or open to others
    │   ├── NotEnoughDevices           fewer GPUs than replicas * tp_size
    │   └── InvalidWeights             weights do not fit the model or memory, or are not finite
    │       └── InvalidAdapter         a LoRA adapter cannot be loaded
    ├── Overloaded                     the driver's queue is full; try again later
    ├── DeadlineExceeded (TimeoutError)
    ├── RemoteError                    an exception inside the actor, with its traceback
    ├── RolloutFailed                  too many recent samples of a rollout failed
    ├── ToolError                      a tool that the model called gave no result
    ├── EngineError                    the engine aborted a well-formed request
    ├── WeightUpdateError              an update was aborted; every worker has its old weights
    │   ├── SettingsMismatch           sender and worker could not form a group: a setting differs
    │   └── UpdateInProgress           another update or copy is running; the new one did not start
    ├── WorkerError
    │   ├── WorkerStartError           a worker exited or failed before it was ready
    │   ├── WorkerLost                 a worker was lost while it held the call
    │   └── WeightsLost                no process has the current weights; send them again
    ├── ProtocolError                  a peer sent a message that is not part of the protocol
    └── Closed                         the pool, client or stream is already closed

The caller can fix a ``UsageError``. The author of the actor can fix a ``RemoteError``. The operator
can fix a ``WorkerError`` or an ``EngineError``. Every error can be pickled and keeps its
attributes.
"""

from __future__ import annotations

from typing import Any, Final

__all__ = [
    "Closed",
    "ContextFull",
    "DeadlineExceeded",
    "EngineError",
    "InvalidAdapter",
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
    "ToolError",
    "UnknownAdapter",
    "UnknownEndpoint",
    "UpdateInProgress",
    "UsageError",
    "WeightUpdateError",
    "WeightsLost",
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
    """Base class of all errors. ``message`` states what was wrong and what to do."""

    message: str

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, dict(self.__dict__))


class UsageError(SglrlError, ValueError):
    """The call is wrong as written. Usually nothing was sent, and no worker was affected."""


class InvalidRequest(UsageError):
    """A prompt, token id, sampling value, regex, grammar or schema cannot be served."""


class ContextFull(InvalidRequest):
    """No token fits after the prompt of a turn of a session, with what was observed."""


class UnknownAdapter(InvalidRequest):
    """No LoRA adapter of this name is loaded, or it was unloaded while the request ran."""


class UnknownEndpoint(UsageError, AttributeError):
    """The actor declares no endpoint of that name."""


class MessageTooLarge(UsageError):
    """The arguments (or a result) exceed ``max_message_bytes``."""


class ModelError(UsageError):
    """The model folder does not exist, or a file in it cannot be read."""


class InvalidKeys(UsageError):
    """A file of CURVE keys is missing, holds no key, or can be read or changed by others."""


class NotEnoughDevices(UsageError):
    """Fewer GPUs are visible than ``replicas * tp_size`` requires."""


class InvalidWeights(UsageError):
    """The weights of an update cannot be loaded.

    They do not match the loaded model (unknown or missing tensors, wrong shapes or dtypes), a value
    is NaN, infinite or too large for the engine's dtype, or there is not enough memory. Every
    worker that accepts calls keeps its old weights.
    """


class InvalidAdapter(InvalidWeights):
    """A LoRA adapter cannot be loaded: its configuration or a tensor does not fit the engine.

    No worker has the new adapter. If there is an old adapter of this name, every worker keeps it.
    """


class WeightUpdateError(SglrlError):
    """A weight update was aborted. Every worker that accepts calls keeps its old weights."""


class SettingsMismatch(WeightUpdateError):
    """Two processes that exchange weights differ in a setting that must be equal.

    The setting is the version of torch or NCCL, or an environment variable of NCCL. Collectives
    between the processes would fail or hang.
    """


class UpdateInProgress(WeightUpdateError):
    """Another weight update, or a copy of the weights to a new worker, is running.

    The other operation did not end within the caller's timeout, or the caller asked not to wait.
    The caller's update did not start.
    """


class Overloaded(SglrlError):
    """The driver's bounded queue is full, or a stream has too many unread items.

    A call is not sent while the queue is full. Submit it again when other calls have ended.
    """


class DeadlineExceeded(SglrlError, TimeoutError):
    """The deadline passed before the answer arrived. The worker aborts the call."""


class RemoteError(SglrlError):
    """An endpoint raised an exception in the actor's process.

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
    """More than ``max_failure_rate`` of the latest attempts of a rollout failed.

    The message contains the rate and the most frequent error. ``__cause__`` is the latest error.
    """


class ToolError(SglrlError):
    """A tool that the model called gave no result. ``__cause__`` is the tool's own exception.

    Attributes:
        tool: the name of the tool that the model called.
        call_id: the id of the tool call.
    """

    tool: str
    call_id: str

    def __init__(self, message: str, *, tool: str = "", call_id: str = "") -> None:
        super().__init__(message)
        self.tool = tool
        self.call_id = call_id


class EngineError(SglrlError):
    """The engine aborted a well-formed request.

    The reason is the engine's own queue limit, a fault in the engine, or a model whose logits are
    NaN or infinite.
    """


NOT_FINITE: Final = (
    "the model's logits are not finite (NaN or infinite), so no token can be sampled: check "
    "whether it has diverged (weights version {})"
)
"""Message of an ``EngineError``. The placeholder is the version of the weights."""


class WorkerError(SglrlError):
    """A worker process failed.

    Attributes:
        worker: the worker's index in its pool.
    """

    worker: int

    def __init__(self, message: str, *, worker: int = -1) -> None:
        super().__init__(message)
        self.worker = worker


class WorkerStartError(WorkerError):
    """A worker exited or failed before it was ready.

    Attributes:
        output: the last lines that the worker wrote to stdout and stderr.
        log: the path of the file with the whole output of the worker, or "".
    """

    output: str
    log: str

    def __init__(self, message: str, *, worker: int = -1, output: str = "", log: str = "") -> None:
        super().__init__(message, worker=worker)
        self.output = output
        self.log = log

    def __str__(self) -> str:
        if not self.output:
            return self.message
        where = f" ({self.log})" if self.log else ""
        return f"{self.message}\n\nLast output of the worker{where}:\n{self.output.rstrip()}"


class WorkerLost(WorkerError):
    """A worker was lost while it held the call, and no other worker could continue the call.

    Attributes:
        state_lost: whether the call was made through ``ActorHandle.lease`` or ``handle[i]``, so
            that the state of the actor is lost with the process.
    """

    state_lost: bool

    def __init__(self, message: str, *, worker: int = -1, state_lost: bool = False) -> None:
        super().__init__(message, worker=worker)
        self.state_lost = state_lost


class WeightsLost(WorkerError):
    """Every process that had the current weights was lost, so no worker accepts calls.

    The workers accept calls again after the next update of all weights.
    """


class ProtocolError(SglrlError):
    """A peer sent frames that are not part of this version of the protocol."""


class Closed(SglrlError):
    """The pool, client or stream is already closed."""


WIRE_ERRORS: Final[dict[str, type[SglrlError]]] = {
    cls.__name__: cls
    for cls in (
        InvalidRequest,
        UnknownAdapter,
        UnknownEndpoint,
        MessageTooLarge,
        EngineError,
        UsageError,
        InvalidWeights,
        InvalidAdapter,
        SettingsMismatch,
        UpdateInProgress,
        WeightUpdateError,
    )
}
"""Errors that a worker may send by name. Any other error arrives as ``RemoteError``."""


DRIVER_ERRORS: Final[dict[str, type[SglrlError]]] = {
    **WIRE_ERRORS,
    **{
        cls.__name__: cls
        for cls in (
            Closed,
            DeadlineExceeded,
            ModelError,
            Overloaded,
            ProtocolError,
            WeightsLost,
            WorkerLost,
        )
    },
}
"""Errors that a driver may send by name to a client in another process."""


def from_wire(kind: str, message: str, traceback: str) -> SglrlError:
    """Return the exception for an error that a worker sent."""
    cls = WIRE_ERRORS.get(kind)
    if cls is not None:
        return cls(message)
    return RemoteError(f"{kind}: {message}", kind=kind, traceback=traceback)
