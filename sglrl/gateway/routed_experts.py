"""Routed experts in requests and answers, in the format of SGLang's server.

Fields: ``return_routed_experts``, and ``routed_experts_start_len``, the first position that is
wanted. See ``srt/entrypoints/openai/protocol.py`` of SGLang.
"""

from __future__ import annotations

import base64
from typing import Any

from ..errors import InvalidRequest
from ..inference.completion import Completion


def given_experts(wanted: bool | None, start: int | None) -> dict[str, Any]:
    """Return the field of ``SamplingParams`` for the fields of a request.

    Raises:
        InvalidRequest: the position is negative, or no experts are wanted.
    """
    if (start or 0) < 0:
        raise InvalidRequest("routed_experts_start_len must not be negative")
    if start and not wanted:
        raise InvalidRequest("routed_experts_start_len needs return_routed_experts=true")
    return {"return_routed_experts": True} if wanted else {}


def check_experts(wanted: bool | None, completions: int | None) -> None:
    """Raise ``InvalidRequest`` if an answer would need the experts of several completions.

    An answer of OpenAI's APIs has one place for them.
    """
    if wanted and (completions or 1) > 1:
        raise InvalidRequest("return_routed_experts needs n=1 and a single prompt")


def experts_of(completion: Completion, start: int | None) -> dict[str, Any]:
    """Return the fields of an answer for the rows from a position on.

    ``routed_experts``: int32 [tokens, layers, k] in base64, as SGLang sends it.
    ``routed_experts_start_len``: the position of the first row. SGLang does not send it. A turn of
    a session has only rows that no earlier turn had.
    """
    first = max(start or 0, completion.routed_from)
    rows = completion.routed_experts
    data = b"" if rows is None else rows[first - completion.routed_from :].astype("<i4").tobytes()
    return {
        "routed_experts": base64.b64encode(data).decode(),
        "routed_experts_start_len": first,
    }
