"""Routed experts in requests and answers, in the formats of SGLang's and vLLM's servers.

SGLang's requests have the fields ``return_routed_experts`` and ``routed_experts_start_len``. The
second is the first position whose experts are wanted. See ``srt/entrypoints/openai/protocol.py`` of
SGLang.

vLLM returns experts whenever the engine keeps them, from the position
``routed_experts_prompt_start`` on (``sampling_params.py``). vLLM's answer contains a ``.npy`` file.
The client of verifiers cannot read it, so prime-rl converts it. Our answer has the form after this
conversion (``verifiers/v1/graph.py`` 0.4.0).
"""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from ..errors import InvalidRequest
from ..inference.completion import Completion


def given_experts(wanted: bool | None, start: int | None) -> dict[str, Any]:
    """Return the field of ``SamplingParams`` for the fields of a request.

    Args:
        wanted: the value of ``return_routed_experts``.
        start: the value of ``routed_experts_start_len``.

    Raises:
        InvalidRequest: ``start`` is negative, or is given although no experts are wanted.
    """
    if (start or 0) < 0:
        raise InvalidRequest("routed_experts_start_len must not be negative")
    if start and not wanted:
        raise InvalidRequest("routed_experts_start_len needs return_routed_experts=true")
    return {"return_routed_experts": True} if wanted else {}


def check_experts(wanted: bool | None, completions: int | None) -> None:
    """Raise ``InvalidRequest`` if an answer would need the experts of several completions.

    An answer of OpenAI's APIs has only one field for experts.
    """
    if wanted and (completions or 1) > 1:
        raise InvalidRequest("return_routed_experts needs n=1 and a single prompt")


def experts_of(completion: Completion, start: int | None) -> dict[str, Any]:
    """Return the fields of an answer with the experts from a position on.

    ``routed_experts`` is int32 [tokens, layers, k] in base64, as SGLang sends it.
    ``routed_experts_start_len`` is the position of the first row, which SGLang does not send. In a
    session, a turn does not repeat the rows of earlier turns.
    """
    first = max(start or 0, completion.routed_from)
    rows = completion.routed_experts
    data = b"" if rows is None else rows[first - completion.routed_from :].astype("<i4").tobytes()
    return {
        "routed_experts": base64.b64encode(data).decode(),
        "routed_experts_start_len": first,
    }


def experts_for_verifiers(completion: Completion) -> dict[str, Any] | None:
    """Return the experts of a completion in the form for verifiers, or None if it has none.

    ``data`` is uint8 or uint16 of the given ``shape``, [tokens, layers, k], in base64. The client
    requires that ``data`` is the first field. ``start`` is the position of the first row.
    """
    rows = completion.routed_experts
    if rows is None:
        return None
    rows = rows.astype(np.uint8 if rows.itemsize == 1 else np.dtype("<u2"), copy=False)
    return {
        "data": base64.b64encode(rows.tobytes()).decode(),
        "shape": rows.shape,
        "start": completion.routed_from,
        "dtype": rows.dtype.name,
    }
