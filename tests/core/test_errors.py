"""The error tree: its shape, pickling, and errors rebuilt from a worker's message."""

from __future__ import annotations

import copy
import pickle
import re

import pytest

from sglrl import errors
from sglrl.errors import (
    RemoteError,
    SglrlError,
    UsageError,
    WorkerError,
    WorkerLost,
    WorkerStartError,
    from_wire,
)

TREE = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, SglrlError)
]


def make(cls: type[SglrlError]) -> SglrlError:
    if issubclass(cls, WorkerStartError):
        return cls("what to do", worker=3, output="last line\n")
    if issubclass(cls, WorkerError):
        return cls("what to do", worker=3)
    if issubclass(cls, RemoteError):
        return cls("what to do", kind="KeyError", traceback="Traceback ...\n")
    return cls("what to do")


@pytest.mark.parametrize("cls", TREE)
def test_survives_pickle_with_its_attributes(cls: type[SglrlError]) -> None:
    error = make(cls)
    error.add_note("said on the way")
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        again = pickle.loads(pickle.dumps(error, protocol))
        assert type(again) is cls
        assert again.args == ("what to do",)
        assert vars(again) == vars(error)
        assert str(again) == str(error)
    assert vars(copy.copy(error)) == vars(error)


def test_the_docstring_draws_exactly_the_tree() -> None:
    drawn: dict[str, str] = {}
    parents: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        found = re.match(r"    ((?:│   |    )*)(?:[├└]── )?([A-Z]\w+)", line)
        if found is None:
            continue
        depth = len(found[1]) // 4 + (found[2] != "SglrlError")
        del parents[depth:]
        drawn[found[2]] = parents[-1] if parents else ""
        parents.append(found[2])
    real = {c.__name__: "" if c is SglrlError else c.__bases__[0].__name__ for c in TREE}
    assert drawn == real


def test_public_names() -> None:
    assert errors.__all__ == sorted(cls.__name__ for cls in TREE)


def test_two_errors_are_also_what_python_calls_them() -> None:
    assert issubclass(UsageError, ValueError)
    assert issubclass(errors.DeadlineExceeded, TimeoutError)
    with pytest.raises(TimeoutError, match="too late"):
        raise errors.DeadlineExceeded("too late")


def test_text_includes_what_the_worker_said() -> None:
    assert "Last output of the worker:\nlast line" in str(make(WorkerStartError))
    assert "Remote traceback:\nTraceback ..." in str(make(RemoteError))
    assert str(WorkerStartError("alone")) == "alone"
    assert str(RemoteError("alone")) == "alone"
    assert make(WorkerLost).worker == 3  # type: ignore[attr-defined]


def test_an_update_that_was_given_up_can_be_caught_as_such() -> None:
    """This covers errors that left every worker with its old weights.

    The exceptions are errors that the caller has to fix.
    """
    assert issubclass(errors.SettingsMismatch, errors.WeightUpdateError)
    assert issubclass(errors.UpdateInProgress, errors.WeightUpdateError)
    assert not issubclass(errors.WeightUpdateError, UsageError)
    assert issubclass(errors.InvalidWeights, UsageError)
    assert not issubclass(errors.InvalidWeights, errors.WeightUpdateError)


def test_errors_of_the_weight_channel_keep_their_type() -> None:
    assert {
        "InvalidWeights",
        "SettingsMismatch",
        "UpdateInProgress",
        "UsageError",
        "WeightUpdateError",
    } <= set(errors.WIRE_ERRORS)


@pytest.mark.parametrize("kind", sorted(errors.WIRE_ERRORS))
def test_known_kinds_come_back_as_themselves(kind: str) -> None:
    error = from_wire(kind, "what to do", "Traceback ...")
    assert type(error) is getattr(errors, kind)
    assert str(error) == "what to do"


@pytest.mark.parametrize(
    "kind", ["KeyError", "Closed", "WorkerLost", "SglrlError", "", "__class__"]
)
def test_any_other_kind_is_a_remote_error(kind: str) -> None:
    error = from_wire(kind, "what to do", "Traceback ...")
    assert type(error) is RemoteError
    assert error.kind == kind
    assert error.message == f"{kind}: what to do"
    assert error.traceback == "Traceback ..."
