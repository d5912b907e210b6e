"""The grammar of a tool call's arguments. It allows only texts that are read as valid arguments."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from ..errors import InvalidRequest
from .call_style import CallStyle
from .formats import Format, either, exactly, literal, optional, sequence
from .json_grammar import JsonGrammar, json_grammar, text_expression, types_of
from .pattern_grammar import Chars, UnsupportedPattern, class_expression, complement, intersection
from .schema_forms import Form, Forms, is_closed, reject
from .schema_values import valid

_NAME: Final = "[A-Za-z_][A-Za-z0-9_]*"
"""The pattern for the names of arguments that a schema allows but does not declare."""


def arguments_format(
    schema: Any, style: CallStyle, markers: list[str], tokens: Mapping[str, int]
) -> Format:
    """Return the format of the arguments of one tool.

    Args:
        schema: the schema of the object that contains all arguments.
        style: how the model's template writes calls.
        markers: texts that no argument may contain, because the call would be misread.
        tokens: the special tokens of the model.

    Raises:
        InvalidRequest: the schema is wrong, has a keyword that cannot be enforced, or allows no
            object.
    """
    if not style.tagged:
        return {"type": "grammar", "grammar": json_grammar(schema, markers=markers)}
    made = _Tagged(schema, style, markers, tokens)
    try:
        return made.arguments(schema)
    except InvalidRequest:
        raise
    except (TypeError, ValueError, KeyError, AttributeError, re.error, RecursionError) as error:
        raise InvalidRequest(f"json_schema is not a schema: {error!r:.200}") from None


class _Tagged:
    """Makes the format of arguments that are written one by one, each between its own tags."""

    def __init__(
        self, root: Any, style: CallStyle, markers: list[str], tokens: Mapping[str, int]
    ) -> None:
        self._root = root
        self._tags = [literal(text, tokens) for text in (style.before, style.between, style.after)]
        """The formats of ``style.before``, ``style.between`` and ``style.after``."""
        tags = re.findall(r"</[^<>\s]+>", style.call)
        self._excluded = list(dict.fromkeys([*tags, *markers]))
        heads = [(ord(text[0]), ord(text[0])) for text in self._excluded]
        self._plain = complement(heads)
        """The characters that begin none of the excluded texts."""
        self._forms = Forms(root)

    def arguments(self, schema: Any) -> Format:
        forms = [
            form for form in self._forms.alternatives(schema, "") if "object" in types_of(form)
        ]
        members = [one for form in forms if (one := self._members(form)) is not None]
        if not members:
            raise InvalidRequest("json_schema: no arguments are valid for the tool's parameters")
        return either(members)

    def _members(self, form: Form) -> Format | None:
        for keyword in ("enum", "maxProperties", "patternProperties", "propertyNames"):
            if keyword in form:
                reject("", keyword, "the model writes each argument by itself")
        required = form.get("required", [])
        if form.get("minProperties", 0) > len(required):
            reject("", "minProperties", "the model writes each argument by itself; use 'required'")
        properties = dict(form.get("properties", {}))
        others = form.get("additionalProperties", not is_closed(form))
        for name in required:
            properties.setdefault(name, form.get("additionalProperties", True))
        elements: list[Format] = []
        for name, schema in properties.items():
            value = self._value(schema, f"/properties/{name}")
            if value is None:
                if name in required:
                    return None
                continue
            one = self._member(exactly(name), value)
            elements += [one] if name in required else optional([one])
        value = self._value(others, "/additionalProperties")
        if value is not None and not properties:
            name_format = {"type": "regex", "pattern": _NAME}
            elements.append({"type": "star", "content": self._member(name_format, value)})
        return sequence(elements) if elements else exactly("")

    def _member(self, name: Format, value: Format) -> Format:
        before, between, after = self._tags
        return sequence([*before, name, *between, value, *after])

    def _value(self, schema: Any, path: str) -> Format | None:
        """Return the format of the values of one argument, or None if no value is valid."""
        formats: list[Format] = []
        for form in self._forms.alternatives(schema, path):
            if "enum" in form:
                values = [one for one in form["enum"] if valid(form, one, self._root)]
                texts = [one for one in values if isinstance(one, str)]
                formats += [exactly(one) for one in texts if not self._breaks(one)]
                others = [one for one in values if not isinstance(one, str)]
                formats += self._json({"enum": others}, path)
                continue
            types = types_of(form)
            if "string" in types:
                text = text_expression(form, path, self._char)
                if text is None:
                    # This form allows any text, and so also the texts of all other forms.
                    return {"type": "any_text", "excludes": self._excluded}
                formats.append({"type": "grammar", "grammar": f"root ::= {text}\n"})
            others = [one for one in types if one != "string"]
            formats += self._json({**form, "type": others}, path) if others else []
        return either(formats) if formats else None

    def _json(self, form: Form, path: str) -> list[Format]:
        grammar = JsonGrammar(self._root, markers=self._excluded)
        expression = grammar.form(form, path)
        if expression is None:
            return []
        return [{"type": "grammar", "grammar": grammar.text(expression)}]

    def _char(self, chars: Chars) -> str:
        """Return the expression of one character of an unquoted text."""
        if len(chars) > 1 or chars[0][0] != chars[0][1]:
            chars = intersection(chars, self._plain)
        if not chars:
            raise UnsupportedPattern("a set of characters is empty, or has only those of tags")
        return class_expression(chars)

    def _breaks(self, text: str) -> bool:
        return any(part in text for part in self._excluded)
