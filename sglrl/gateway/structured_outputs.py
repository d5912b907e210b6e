"""vLLM's field ``structured_outputs``: a grammar that the text must follow.

Source: ``StructuredOutputsParams`` of vLLM
(https://docs.vllm.ai/en/latest/features/structured_outputs).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from ..errors import InvalidRequest
from ..inference.sampling import GRAMMARS
from .dialect import convert_fields

_FORM: Final = "response_format"
_OURS: Final = {
    "json": "json_schema",
    "json_object": "json_schema",
    "regex": "regex",
    "grammar": "ebnf",
}
"""Our names of the grammars of ``structured_outputs``. All others become structural tags."""


class _Fields(msgspec.Struct, frozen=True, kw_only=True):
    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None

    def given(self) -> list[tuple[str, Any]]:
        """Return the given grammars as names and values of ``SamplingParams``."""
        fields = [
            ("json_schema", self.json),
            ("json_schema", {"type": "object"} if self.json_object else None),
            ("regex", self.regex),
            ("ebnf", self.grammar),
            ("structural_tag", _tag_of(self.choice)),
            ("structural_tag", self.structural_tag),
        ]
        return [(name, value) for name, value in fields if value is not None]


def with_structured_outputs(
    sampling: Mapping[str, Any], fields: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return fields of ``SamplingParams`` with the grammar of ``structured_outputs``.

    Args:
        sampling: the other sampling parameters of the request.
        fields: the fields of ``structured_outputs``. None, or empty: there is no grammar.

    Raises:
        InvalidRequest: a field is wrong, or there are two grammars.
    """
    given = convert_fields(fields or {}, _Fields, where="structured_outputs").given()
    if len(given) > 1:
        raise InvalidRequest(f"structured_outputs: give one grammar, got {len(given)}")
    other = next((name for name in GRAMMARS if sampling.get(name) is not None), None)
    if given and other is not None:
        own = _FORM if other in ("json_schema", "structural_tag") else other
        raise InvalidRequest(f"structured_outputs and {own} are both grammars: give one of them")
    return {**sampling, **dict(given)}


def grammar_names(form: Any, fields: Mapping[str, Any] | None) -> dict[str, str]:
    """Return the client's name of the grammar for each of our names. See ``TurnRequest.names``.

    Args:
        form: the field ``response_format``, or None.
        fields: the fields of ``structured_outputs``.
    """
    if fields:
        given = next((name for name, value in fields.items() if value is not None), "")
        ours = _OURS.get(given, "structural_tag")
        return {ours: f"structured_outputs.{given}"}
    return {} if form is None else dict.fromkeys(("json_schema", "structural_tag"), _FORM)


def _tag_of(choice: list[str] | None) -> dict[str, Any] | None:
    """Return the structural tag that allows one of several texts."""
    if choice is None:
        return None
    if not choice or not all(choice):
        raise InvalidRequest(
            "structured_outputs: choice must be a list of texts that are not empty"
        )
    texts = [{"type": "const_string", "value": text} for text in choice]
    return {"type": "structural_tag", "format": {"type": "or", "elements": texts}}
