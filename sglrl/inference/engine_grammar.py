"""Check the grammars that callers give, and convert their JSON schemas to EBNF for XGrammar."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import msgspec

from ..errors import InvalidRequest
from ..wire.codec import malformed
from .json_grammar import json_grammar
from .tokens import check_text


def check_grammar(name: str, text: str) -> None:
    """Raise ``InvalidRequest`` for a grammar that would crash an engine or cannot be enforced.

    XGrammar crashes on some text that is not JSON, on JSON so deep that it overflows the stack, and
    on a NUL in a regular expression. A JSON schema may have only keywords that can be enforced.
    Other errors in a grammar are detected by the engine.
    """
    if name in ("regex", "ebnf"):
        check_text(name, text)
        _check_nul(name, text)
        return
    try:
        decoded = msgspec.json.decode(text)
        patterns = [*_patterns(decoded)] if "\\u0000" in text else []
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
        raise InvalidRequest(f"{name} is not JSON: {malformed(error, text)}") from None
    for pattern in patterns:
        _check_nul(f"a pattern in {name}", pattern)
    engine_grammar(name, text)


@lru_cache(256)
def engine_grammar(name: str, text: str, spaces: bool = True) -> tuple[str, str]:
    """Return the name and the text of the grammar for the engine.

    Args:
        name: the sampling parameter: "json_schema", "regex", "ebnf" or "structural_tag".
        text: the value of the parameter.
        spaces: whether JSON may contain any white space, see ``json_grammar``.

    Raises:
        InvalidRequest: a JSON schema is wrong, or has a keyword that cannot be enforced.
    """
    if name == "json_schema":
        return "ebnf", json_grammar(msgspec.json.decode(text), spaces=spaces)
    if name == "structural_tag":
        tag = msgspec.json.decode(text)
        return name, msgspec.json.encode(_lowered(newer_tag(tag), spaces)).decode()
    return name, text


def newer_tag(tag: Any) -> Any:
    """Convert a structural tag of the older form ("structures", "triggers") to a "format"."""
    if not isinstance(tag, dict) or "format" in tag or "structures" not in tag:
        return tag
    try:
        tags = [
            {
                "type": "tag",
                "begin": one["begin"],
                "content": {"type": "json_schema", "json_schema": one.get("schema") or {}},
                "end": one["end"],
            }
            for one in tag["structures"]
        ]
    except (TypeError, KeyError, AttributeError) as error:
        raise InvalidRequest(f"structural_tag: 'structures' are wrong: {error!r}") from None
    form = {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags}
    form["at_least_one"] = bool(tag.get("at_least_one", False))
    return {"type": "structural_tag", "format": form}


def _lowered(part: Any, spaces: bool) -> Any:
    """Return a part of a structural tag with its JSON schemas converted to grammars."""
    if isinstance(part, list):
        return [_lowered(one, spaces) for one in part]
    if not isinstance(part, dict):
        return part
    if part.get("type") == "json_schema" and part.get("style", "json") == "json":
        schema = part.get("json_schema")
        grammar = json_grammar({} if schema is None else schema, spaces=spaces)
        return {"type": "grammar", "grammar": grammar}
    return {name: _lowered(one, spaces) for name, one in part.items()}


def _patterns(value: Any) -> Iterator[str]:
    """Yield the regular expressions in a schema or structural tag."""
    if isinstance(value, dict):
        pattern = value.get("pattern")
        if isinstance(pattern, str):
            yield pattern
        patterns = value.get("patternProperties")
        if isinstance(patterns, dict):
            yield from patterns
        value = [*value.values()]
    if isinstance(value, list):
        for part in value:
            yield from _patterns(part)


def _check_nul(name: str, pattern: str) -> None:
    """Raise ``InvalidRequest`` if a pattern contains a NUL.

    XGrammar (0.2.1, 0.2.7) ignores the text after a NUL. If no text is before the NUL, XGrammar
    reads invalid memory, which crashes the worker.
    """
    if "\0" in pattern:
        raise InvalidRequest(f"{name} holds a NUL character; write it as \\x00: {pattern!r:.200}")
