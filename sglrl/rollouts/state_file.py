"""Save and load the state of a run. The state file is a JSON object::

{"format": "sglrl.rollout", "version": 1, "state": {"next": 7, "unfinished": [3, 5], ...}}
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from ..errors import UsageError
from ..sessions.atomic_file import new_content
from ..wire.codec import malformed

_FORMAT: Final = "sglrl.rollout"
_VERSION: Final = 1


class _Header(msgspec.Struct):
    """The fields that every version of the file has."""

    format: str
    version: int


class State(msgspec.Struct):
    """The keys of ``Rollout.state_dict``. States of older versions have only the first two.

    Attributes:
        next: the number of items that were begun. These are the first items of the data set.
        unfinished: the indices of the begun items that are not finished.
        length: the number of items of the data set, or None if it is not known.
        read: the number of items that were read. These are the first items of the data set.
        fingerprint: the ``Fingerprint`` of the items that were read, or "" if it is not known.
    """

    next: int
    unfinished: list[int]
    length: int | None = None
    read: int = 0
    fingerprint: str = ""


class _File(_Header):
    state: State


def save_state(path: str | os.PathLike[str], state: Mapping[str, Any]) -> None:
    """Write the ``state_dict`` of a run to a file that ``load_state`` reads."""
    content = _File(_FORMAT, _VERSION, State(**state))
    with new_content(path) as file:
        file.write(msgspec.json.encode(content))


def load_state(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the ``state_dict`` in a file that ``save_state`` wrote.

    Raises:
        UsageError: there is no such file, or it has another format or version.
        OSError: the file cannot be read.
    """
    try:
        with open(path, "rb") as file:
            content = file.read()
    except FileNotFoundError:
        raise UsageError(
            f"state={os.fspath(path)!r}: there is no such file; leave state out to run all items"
        ) from None
    try:
        header = msgspec.json.decode(content, type=_Header)
        if header.format != _FORMAT:
            raise UsageError(f"{path} has the format {header.format!r}, not {_FORMAT!r}")
        if header.version != _VERSION:
            raise UsageError(
                f"{path} has version {header.version} of the format, this sglrl reads version "
                f"{_VERSION}; read it with the sglrl that wrote it"
            )
        return msgspec.structs.asdict(msgspec.json.decode(content, type=_File).state)
    # In msgspec 0.19, MsgspecError is not a ValueError.
    except (msgspec.MsgspecError, ValueError) as error:
        why = malformed(error, content)
        raise UsageError(f"{path} was not written by Rollout.save: {why}") from None
