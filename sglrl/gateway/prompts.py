"""Read the prompts of a request: texts or token ids, one prompt or several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from ..errors import InvalidRequest

Prompt = str | list[int]
MAX_COMPLETIONS: Final = 4096
"""Maximum number of completions that one request may ask for."""


def prompts_of(name: str, value: Any) -> tuple[bool, list[Prompt]]:
    """Return whether a field has a list of prompts, and the prompts.

    Args:
        name: the name of the field, for error messages.
        value: a text, a list of token ids, a list of texts, or a list of lists of token ids.

    Raises:
        InvalidRequest: the value is something else, or is an empty list.
    """
    if isinstance(value, str):
        return False, [value]
    if isinstance(value, list):
        if not value:
            raise InvalidRequest(f"{name} is empty")
        if _are_ids(value):
            return False, [value]
        if all(isinstance(one, str) for one in value):
            return True, value
        if all(isinstance(one, list) and _are_ids(one) for one in value):
            return True, value
    raise InvalidRequest(
        f"{name} must be text, a list of token ids, or a list of texts or of lists of token ids, "
        f"got {value!r:.200}"
    )


def _are_ids(value: Sequence[Any]) -> bool:
    return all(type(one) is int for one in value)


def check_completions(prompts: int, choices: int) -> None:
    """Check the number of completions that a request asks for.

    Raises:
        InvalidRequest: the number is too large.
    """
    if prompts * choices > MAX_COMPLETIONS:
        raise InvalidRequest(
            f"the request asks for {prompts * choices:,} completions; send at most "
            f"{MAX_COMPLETIONS:,} in one request"
        )
