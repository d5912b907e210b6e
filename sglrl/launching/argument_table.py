"""The table of all fields of SGLang's ``ServerArgs``, with the treatment of each by ``launch``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple

from ..errors import UsageError
from .accepted_arguments import HARMLESS, PASSED_ON, TESTED, wrong_range
from .engine_fields import EngineField
from .rejected_arguments import REJECTED
from .text_arguments import check_text

State = Literal["tested", "passed on", "set by sglrl", "harmless", "rejected"]

OWN_ARGUMENTS: Final = {
    "model_path": "the first argument of launch",
    "device": "device=",
    "tp_size": "tp_size=",
    "dp_size": "replicas=",
    "dtype": "dtype=",
    "base_gpu_id": "CUDA_VISIBLE_DEVICES",
    "nccl_port": "nothing, sglrl picks it",
    "dist_init_addr": "nothing, sglrl picks it",
    "host": "nothing, there is no HTTP server",
    "port": "nothing, there is no HTTP server",
    "watchdog_timeout": "hang_timeout=",
    "skip_tokenizer_init": "nothing, the scheduler needs the tokenizer for stop strings",
}
"""Fields that ``launch`` sets itself, with the argument of ``launch`` to use in their place."""

STATES: Final[dict[State, str]] = {
    "tested": "SGLang's scheduler applies it, and the named test shows it.",
    "passed on": "SGLang's scheduler reads it in the worker. No test of sglrl covers it; most need "
    "certain GPUs or models.",
    "set by sglrl": "An argument of sglrl takes its place.",
    "harmless": "It is accepted and has nothing to do.",
    "rejected": "`launch` raises `UsageError`, unless the value asks for nothing.",
}
"""The meaning of each state, as Markdown."""


class Argument(NamedTuple):
    """The treatment of one field by ``launch``.

    Attributes:
        state: one of ``STATES``.
        note: the reason for the state. For "tested", this is the test. For "passed on", it is the
            subject of the field. For "set by sglrl", it is the argument to use in its place. For
            "harmless" and "rejected", it is the reason why the field has no use here.
    """

    state: State
    note: str


_STATES: Final[tuple[tuple[State, dict[str, str]], ...]] = (
    ("tested", TESTED),
    ("passed on", PASSED_ON),
    ("set by sglrl", OWN_ARGUMENTS),
    ("harmless", HARMLESS),
    ("rejected", REJECTED),
)
ARGUMENTS: Final = MappingProxyType(
    {name: Argument(state, note) for state, names in _STATES for name, note in names.items()}
)
"""All fields of the supported versions of SGLang, by name."""


def check_argument(name: str, value: Any, field: EngineField) -> None:
    """Check an argument for one of SGLang's fields.

    Raises:
        UsageError: the field is rejected, set by sglrl or not known, or the value has a wrong type
            or is out of range. A rejected field may have a value that asks for nothing (the
            default, None or False).
    """
    argument = ARGUMENTS.get(name)
    if argument is None:
        raise UsageError(
            f"{name!r} is a field of this SGLang's ServerArgs that sglrl does not know, so it may "
            "have no effect in a worker"
        )
    if argument.state == "set by sglrl":
        raise UsageError(f"{name!r} is set by sglrl. In its place: {argument.note}")
    is_default = type(value) is type(field.default) and value == field.default
    if argument.state == "rejected" and not (value is None or value is False or is_default):
        raise UsageError(f"{name}={value!r:.200} is not supported: {argument.note}")
    field.check(name, value)
    if not is_default and (range_ := wrong_range(name, value)):
        raise UsageError(f"{name} must be {range_}, got {value!r:.200}")
    if not is_default:
        check_text(name, value)


def listed(fields: Iterable[str] = ARGUMENTS) -> list[tuple[str, Argument]]:
    """Return the arguments by state, then by name.

    Args:
        fields: the names to list. Unknown names count as rejected.
    """
    unknown = Argument("rejected", "sglrl does not know it")
    order = list(STATES)
    rows = [(name, ARGUMENTS.get(name, unknown)) for name in fields]
    return sorted(rows, key=lambda row: (order.index(row[1].state), row[0].lstrip("_")))


def counted(fields: Iterable[str] = ARGUMENTS) -> str:
    """Return how many arguments have each state, as a line of text."""
    counts = Counter(argument.state for _, argument in listed(fields))
    return ", ".join(f"{counts[state]} {state}" for state in STATES)


def markdown() -> str:
    """Return the table for the documentation."""
    rows = [f"| `{name}` | {state} | {_note(state, note)} |" for name, (state, note) in listed()]
    states = [f"| {state} | {meaning} |" for state, meaning in STATES.items()]
    return "\n".join(
        [
            "| state | meaning |",
            "|---|---|",
            *states,
            "",
            f"Of the {len(ARGUMENTS)} fields, {counted()}.",
            "",
            "| field | state | test, subject, or what takes its place |",
            "|---|---|---|",
            *rows,
        ]
    )


def _note(state: State, note: str) -> str:
    return f"`{note}`" if state == "tested" else note
