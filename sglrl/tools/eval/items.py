"""Read the items of a jsonl file. A wrong line raises an error before the engines start."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec

from ...errors import InvalidRequest, UsageError
from ...inference.prompts import check_conversation
from ...inference.tokens import check_ids, check_text
from ...wire.codec import malformed

PROMPTS: Final = ("prompt", "messages", "input_ids")
"""The fields of an item that can hold its prompt."""
WRITTEN: Final = ("line", "samples")
"""The fields that the output has in addition to the fields of the input."""
_MAX_TOKENS: Final = 1 << 31
"""Limit of token ids, which are int32. The size of the vocabulary is known only later, when the
engines have started."""


class Item(msgspec.Struct, frozen=True):
    """One line of the input.

    Attributes:
        line: the number of the line, from 1.
        place: the file and the line number, for error messages.
        kind: the name of the field that holds the prompt, from ``PROMPTS``, or "" without a prompt.
        fields: all fields of the line.
    """

    line: int
    place: str
    kind: str
    fields: dict[str, Any]


def read_items(path: Path, *, optional_prompt: bool = False) -> list[Item]:
    """Return the items of a file with one JSON object per line. Blank lines are skipped.

    Args:
        optional_prompt: whether an item may have no prompt, because its agent sends one.

    Raises:
        UsageError: a line is wrong, or there is no item. The error names the line.
        OSError: the file cannot be read.
    """
    items = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        if not line.strip():
            continue
        place = f"{path}:{number}"
        try:
            fields = msgspec.json.decode(line, type=dict[str, Any])
            items.append(Item(number, place, _check(fields, optional_prompt), fields))
        except InvalidRequest as error:
            raise InvalidRequest(f"{place}: {error.message}") from None
        # The line is malformed JSON, is not UTF-8, or has too deep brackets.
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            why = malformed(error, line)
            raise InvalidRequest(f"{place}: the line is not a JSON object: {why}") from None
    if not items:
        raise UsageError(f"{path} has no items; write one JSON object per line")
    return items


def prompt_fields(fields: dict[str, Any]) -> list[str]:
    """Return which of ``PROMPTS`` the fields contain. A field with null does not count."""
    return [name for name in PROMPTS if fields.get(name) is not None]


def _check(fields: dict[str, Any], optional_prompt: bool) -> str:
    """Check the fields of a line. Return the name of the field that holds the prompt, or ""."""
    given = prompt_fields(fields)
    if len(given) > 1 or not (given or optional_prompt):
        what = " and ".join(given) or "none of them"
        raise InvalidRequest(f"give exactly one of {', '.join(PROMPTS)}; got {what}")
    for name in WRITTEN:
        if name in fields:
            raise InvalidRequest(f"the output has a field {name!r} of its own; rename this one")
    if not given:
        return ""
    (kind,) = given
    value = fields[kind]
    if kind == "prompt":
        if not isinstance(value, str) or not value:
            raise InvalidRequest(f"prompt must be text that is not empty, got {value!r:.200}")
        check_text("prompt", value)
    elif kind == "messages":
        if not isinstance(value, list) or not value:
            raise InvalidRequest(f"messages must be a list that is not empty, got {value!r:.200}")
        check_conversation(value)
    elif not isinstance(value, list):
        raise InvalidRequest(f"input_ids must be a list of token ids, got {value!r:.200}")
    else:
        check_ids(value, _MAX_TOKENS)
    return kind
