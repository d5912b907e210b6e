"""Random JSON schemas, and which texts a grammar allows."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import xgrammar
from hypothesis import strategies as st

NAMES = ("a", "b", "ab", "naïve", 'q"', "x<y")
TEXTS = ("", "a", "ab", "1", "null", "é\n", 'say "hi"', "</b>", "[1]", " a ", "日本")
NUMBERS = (0, 1, -1, 7, 12, 100, 0.5, -2.25, 1.48)
PATTERNS = (r"^[a-c]{1,3}$", r"^\d+$", "b", r"^a.b$", r'^["\\]?\S$', "^(yes|no)$", r"[^a]$", "^é+")
_BYTES = [bytes([code]) for code in range(128)] + [c.encode() for c in "éïß日本🙂\u2028"]


def number_limits(draw: Any) -> dict[str, Any]:
    keywords = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
    return {
        name: draw(st.sampled_from(NUMBERS)) for name in keywords if draw(st.integers(0, 3)) == 0
    }


@st.composite
def strings(draw: Any) -> dict[str, Any]:
    kind = draw(st.integers(0, 3))
    if kind == 1:
        return {"type": "string", "pattern": draw(st.sampled_from(PATTERNS))}
    if kind == 2:
        low = draw(st.integers(0, 2))
        return {"type": "string", "minLength": low, "maxLength": low + draw(st.integers(0, 3))}
    return {"type": "string"}


@st.composite
def numbers(draw: Any) -> dict[str, Any]:
    return {"type": draw(st.sampled_from(["integer", "number"])), **number_limits(draw)}


VALUES = st.one_of(
    st.none(), st.booleans(), st.sampled_from(NUMBERS), st.sampled_from(TEXTS),
    st.lists(st.integers(0, 3), max_size=2), st.just({"a": 1}),
)  # fmt: skip
SIMPLE = st.one_of(
    strings(),
    numbers(),
    st.sampled_from([{"type": "null"}, {"type": "boolean"}, {}, True, {"$ref": "#/$defs/d"}]),
    st.sampled_from([{"type": ["string", "null"]}, {"type": ["integer", "string"]}]),
    st.builds(lambda value: {"const": value}, VALUES),
    st.builds(lambda values: {"enum": values}, st.lists(VALUES, min_size=1, max_size=3)),
)


@st.composite
def arrays(draw: Any, part: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "array"}
    if draw(st.booleans()):
        found["items"] = draw(part)
    if draw(st.integers(0, 3)) == 0:
        found["prefixItems"] = draw(st.lists(part, min_size=1, max_size=2))
    if draw(st.booleans()):
        found["minItems"] = draw(st.integers(0, 2))
    if draw(st.booleans()):
        found["maxItems"] = found.get("minItems", 0) + draw(st.integers(0, 2))
    return found


@st.composite
def objects(draw: Any, part: Any, names: Any = NAMES) -> dict[str, Any]:
    chosen = draw(st.lists(st.sampled_from(names), max_size=3, unique=True))
    found: dict[str, Any] = {
        "type": "object",
        "properties": {name: draw(part) for name in chosen},
        "required": [name for name in chosen if draw(st.booleans())],
    }
    if draw(st.integers(0, 3)) == 0:
        found["additionalProperties"] = draw(st.one_of(st.booleans(), part))
    if draw(st.integers(0, 5)) == 0:
        found["maxProperties"] = draw(st.integers(1, 3))
    return found


def combined(part: Any) -> Any:
    lists = st.lists(part, min_size=1, max_size=2)
    return st.one_of(
        arrays(part),
        objects(part),
        st.builds(lambda parts: {"anyOf": parts}, lists),
        st.builds(lambda parts: {"oneOf": parts}, lists),
        st.builds(lambda parts: {"allOf": parts}, lists),
        st.builds(lambda one, parts: {**one, "anyOf": parts}, numbers(), lists),
    )


PARTS = st.recursive(SIMPLE, combined, max_leaves=4)
DEFINITIONS = {"d": {"type": "integer", "minimum": 2, "maximum": 40}}


def with_definitions(schema: Any) -> Any:
    return {**schema, "$defs": DEFINITIONS} if isinstance(schema, dict) else schema


SCHEMAS = PARTS.map(with_definitions)


class Texts:
    """The texts that a grammar in EBNF allows, in a vocabulary of single characters."""

    def __init__(self, grammar: str) -> None:
        self._tokens = [*_BYTES, b"<end>"]
        self._end = len(_BYTES)
        info = xgrammar.TokenizerInfo(
            self._tokens, vocab_size=len(self._tokens), stop_token_ids=[self._end]
        )
        self._grammar = xgrammar.GrammarCompiler(info).compile_grammar(grammar)

    def __contains__(self, text: str) -> bool:
        matcher = xgrammar.GrammarMatcher(self._grammar)
        return matcher.accept_string(text) and matcher.accept_token(self._end)

    def walk(self, chance: random.Random, most: int = 150) -> str | None:
        """Return a random text. None: it gets too long."""
        matcher = xgrammar.GrammarMatcher(self._grammar)
        mask = xgrammar.allocate_token_bitmask(1, len(self._tokens))
        drawn: list[bytes] = []
        while len(drawn) < most:
            matcher.fill_next_token_bitmask(mask)
            bits = np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")
            allowed = np.flatnonzero(bits[: len(self._tokens)]).tolist()
            assert allowed, b"".join(drawn)
            ends = [
                token for token in allowed if self._tokens[token] in (b'"', b"]", b"}", b"<end>")
            ]
            token = chance.choice(ends if ends and chance.random() < 0.3 else allowed)
            if token == self._end:
                return b"".join(drawn).decode()
            assert matcher.accept_token(token)
            drawn.append(self._tokens[token])
        return None


def json_text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
