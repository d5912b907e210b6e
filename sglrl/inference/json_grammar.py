"""Write a JSON schema as a grammar in XGrammar's EBNF.

XGrammar's own conversion ignores some keywords and gets others wrong: for ``minimum: 7`` it allows
2, for ``required`` it ignores names that ``properties`` lacks, and for ``pattern`` it allows
control characters in the JSON. This conversion allows only valid values, and rejects a keyword that
it cannot enforce. The properties of an object must be written in the order of the schema. An object
with ``properties`` has no other properties unless ``additionalProperties`` allows them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from ..errors import InvalidRequest
from .number_grammar import INTEGER, NUMBER, Range, decimals, integers, range_of
from .pattern_grammar import (
    ALL,
    Chars,
    UnsupportedPattern,
    class_expression,
    complement,
    intersection,
    one_of,
    pattern_expression,
    pattern_width,
    quoted,
    simple_pattern,
    times,
)
from .schema_forms import Form, Forms, is_closed, reject
from .schema_values import TYPES, valid

_MAX_RULES: Final = 20_000
_HEX: Final = "[0-9a-fA-F]"
_UNICODE: Final = f'"u" ([0-9a-cA-CefEF] {_HEX}{{3}} | [dD] [0-7] {_HEX}{{2}})'
_ESCAPED: Final = f'["\\\\/bfnrt] | {_UNICODE}'
"""The characters that may follow a backslash. Escapes of surrogates are not allowed."""
_FOLLOWS: Final = "(= [ \\n\\t]* [,}\\]:])"
"""A look-ahead for the characters that may follow a string within JSON."""
_LONGEST: Final = 64
"""The largest length limit for texts with escapes. Each character of such a text needs a rule."""
_PLAIN: Final[Chars] = complement([(0, 31), (34, 34), (92, 92)])
"""The characters that need no escape in a JSON string."""
_SHORT: Final = {8: "b", 9: "t", 10: "n", 12: "f", 13: "r", 34: '"', 92: "\\"}
_DATE: Final = r"\d{4}-(0[1-9]|1[0-2])-(0[1-9]|1\d|2[0-8])"
_TIME: Final = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,9})?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)"
_OCTET: Final = r"(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_LABEL: Final = "[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_FORMATS: Final = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "duration": r"^P(\d+W|\d+D(T\d+H)?|T\d+[HMS])$",
    "uuid": "^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$",
    "ipv4": rf"^({_OCTET}\.){{3}}{_OCTET}$",
    "hostname": rf"^{_LABEL}(\.{_LABEL})*$",
    "email": rf"^[a-zA-Z0-9_+-]+(\.[a-zA-Z0-9_+-]+)*@{_LABEL}(\.{_LABEL})+$",
    "uri": r"^[a-z][a-z0-9+.-]*://[a-zA-Z0-9._~:/?#@!$&*+,;=-]+$",
}
"""Patterns by value of ``format``. A ``pattern`` or a length limit disables ``format``."""


def json_grammar(schema: Any, *, spaces: bool = True, markers: Sequence[str] = ()) -> str:
    """Return the grammar of the JSON texts that are valid for a schema.

    Args:
        schema: the decoded schema.
        spaces: whether any white space is allowed between the parts of the JSON. If False, there is
            exactly one space after each comma and colon.
        markers: texts that the JSON must not contain, because they would end a tool call.

    Raises:
        InvalidRequest: the schema is wrong, or has a keyword that cannot be enforced. The error
            states the keyword and its place.
    """
    grammar = JsonGrammar(schema, spaces=spaces, markers=markers)
    root = grammar.checked(schema)
    return grammar.text(root)


class JsonGrammar:
    """Collects the rules of one grammar. See ``json_grammar`` for the arguments."""

    def __init__(self, root: Any, *, spaces: bool = True, markers: Sequence[str] = ()) -> None:
        self.forms = Forms(root)
        self.root = root
        self._rules: dict[str, str] = {}
        self._made = 0
        self._names: dict[str, str | None] = {}
        self._comma, self._colon, self._space = '", "', '": "', ""
        if spaces:
            self._space = "[ \\n\\t]*"
            self._comma = f'{self._space} "," {self._space}'
            self._colon = f'{self._space} ":" {self._space}'
        self._markers = tuple(markers)
        self._heads = sorted({ord(marker[0]) for marker in markers})
        self._raw = intersection(_PLAIN, complement([(head, head) for head in self._heads]))
        """The characters that need no escape and cannot begin a marker."""
        self._any = ""
        """The name of the rule for any text and its closing quote. "": the rule is not made yet."""

    def text(self, root: str) -> str:
        """Return the text of the grammar with ``root`` as the expression of its root rule."""
        rules = [f"root ::= {root}", *(f"{name} ::= {body}" for name, body in self._rules.items())]
        return "\n".join(rules) + "\n"

    def rule(self, body: str) -> str:
        """Add a rule with this body, and return its name."""
        self._made += 1
        name = f"r{self._made}"
        if self._made > _MAX_RULES:
            raise InvalidRequest(f"json_schema: the grammar has more than {_MAX_RULES} rules")
        self._rules[name] = body
        return name

    def checked(self, schema: Any) -> str:
        """Return the expression of a schema.

        Raises:
            InvalidRequest: the schema is wrong or cannot be enforced, or no value is valid.
        """
        try:
            expression = self.value(schema, "")
        except InvalidRequest:
            raise
        except (TypeError, ValueError, KeyError, AttributeError, re.error, RecursionError) as error:
            raise InvalidRequest(f"json_schema is not a schema: {error!r:.200}") from None
        if expression is None:
            raise InvalidRequest("json_schema: no value is valid for it")
        return expression

    def value(self, schema: Any, path: str) -> str | None:
        """Return the expression of the valid values of a schema, or None if no value is valid."""
        key = json.dumps(schema, sort_keys=True, default=str)
        if key in self._names:
            return self._names[key]
        # Store the name before the body is made, because a schema may refer to itself.
        name = self._names[key] = self.rule("")
        parts = [self.form(form, path) for form in self.forms.alternatives(schema, path)]
        body = one_of(part for part in parts if part is not None)
        if body is None:
            del self._rules[name]
            self._names[key] = None
            return None
        self._rules[name] = body
        return name

    def form(self, form: Form, path: str) -> str | None:
        """Return the expression of the valid values of a form, or None if no value is valid."""
        if "enum" in form:
            values = [one for one in form["enum"] if valid(form, one, self.root)]
            return one_of(self.literal(one) for one in values)
        return one_of(
            part for one in types_of(form) if (part := self._typed(form, one, path)) is not None
        )

    def literal(self, value: Any) -> str:
        """Return the expression of one value."""
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text = re.sub("[\ud800-\udfff]", lambda match: f"\\u{ord(match[0]):04x}", text)
        if any(marker in text for marker in self._markers):
            for head in self._heads:
                text = text.replace(chr(head), f"\\u{head:04x}")
        return quoted(text)

    def _typed(self, form: Form, kind: str, path: str) -> str | None:
        match kind:
            case "null":
                return '"null"'
            case "boolean":
                return '("true" | "false")'
            case "integer" | "number":
                return number_expression(range_of(form), kind)
            case "string":
                return self._string(form, path)
            case "array":
                return self._array(form, path)
        return self._object(form, path)

    # --- strings ----------------------------------------------------------------------------------
    # XGrammar compiles a token mask for each rule. The mask decides about every token only if the
    # rule itself covers the rest of the string, character by character, up to the closing quote,
    # and states what may follow the quote. Otherwise all tokens are checked again at each step,
    # which takes 100 ms.

    def char(self, chars: Chars) -> str:
        """Return the expression of one character of a set within a JSON string.

        Characters that must be escaped are allowed only if the set has no other characters.
        """
        if raw := intersection(chars, self._raw):
            return class_expression(raw)
        codes = [code for low, high in chars for code in range(low, high + 1)]
        if not codes:
            raise UnsupportedPattern("a set of characters is empty")
        parts = [
            quoted(f"\\{_SHORT[code]}" if code in _SHORT else f"\\u{code:04x}") for code in codes
        ]
        return f"({' | '.join(parts)})"

    def _string(self, form: Form, path: str) -> str:
        low, high = form.get("minLength", 0), form.get("maxLength")
        counted = "pattern" not in form and (low or high is not None)
        if counted and (low if high is None else high) <= _LONGEST:
            return f'"\\"" {self._counted(low, high)}'
        body = text_expression(form, path, self.char)
        return f'"\\"" {self._any_text()}' if body is None else f'"\\"" {body} "\\""'

    def _counted(self, low: int, high: int | None) -> str:
        """Return the rule for a text of ``low`` to ``high`` characters and its closing quote."""
        after = self._any_text() if high is None else self._text_rule('"\\""')
        for at in reversed(range(low if high is None else high)):
            end = '"\\"" | ' if at >= low else ""
            raw = class_expression(self._raw)
            after = self._text_rule(f'{end}{raw} {after} | "\\\\" {self._escape()} {after}')
        return after

    def _text_rule(self, body: str) -> str:
        return self.rule(f"({body}) {_FOLLOWS}")

    def _escape(self) -> str:
        if "escape" not in self._rules:
            self._rules["escape"] = _ESCAPED
        return "escape"

    def _any_text(self) -> str:
        """Return the rule for any text and its closing quote."""
        if self._any:
            return self._any
        self._any = name = self.rule("")
        body = f'"\\"" | {class_expression(self._raw)} {name} | "\\\\" {self._escape()} {name}'
        if len(self._heads) == 1:
            # Allow a marker's first character unless the second character of a marker follows.
            (head,) = self._heads
            one, after = quoted(chr(head)), self.rule("")
            seconds = [(ord(marker[1]), ord(marker[1])) for marker in self._markers if marker[1:]]
            safe = class_expression(intersection(self._raw, complement(seconds)))
            rest = f'"\\"" | {safe} {name} | "\\\\" {self._escape()} {name} | {one} {after}'
            self._rules[after] = f"({rest}) {_FOLLOWS}"
            body += f" | {one} {after}"
        self._rules[name] = f"({body}) {_FOLLOWS}"
        return name

    # --- arrays and objects -----------------------------------------------------------------------

    def _array(self, form: Form, path: str) -> str | None:
        first = form.get("prefixItems", [])
        low, high = form.get("minItems", 0), form.get("maxItems")
        known = [self.value(part, f"{path}/prefixItems/{i}") for i, part in enumerate(first)]
        if None in known:
            known = known[: known.index(None)]
            high = len(known) if high is None else min(high, len(known))
        rest: str | None = None
        # An array with ``prefixItems`` has no further items unless ``items`` allows them.
        if "items" in form or not first:
            rest = self.value(form.get("items", True), f"{path}/items")
        if rest is None:
            high = len(known) if high is None else min(high, len(known))
        if high is not None and low > high:
            return None
        elements = [part for part in known if part is not None]
        if high is not None:
            elements = elements[:high]
        written = self._elements(elements, rest, low, high)
        return f'"[" {self._space} {written} {self._space} "]"'

    def _elements(self, known: list[str], rest: str | None, low: int, high: int | None) -> str:
        count = len(known)
        least = max(0, low - count)
        most = None if high is None else high - count
        if rest is None or most == 0:
            after = '""'
        elif count:
            after = f"({self._comma} {rest}){times(least, most)}"
        else:
            more = times(max(0, least - 1), None if most is None else most - 1)
            after = f"{rest} ({self._comma} {rest}){more}"
            if not least:
                after = f'("" | {after})'
        for at in reversed(range(count)):
            comma = self._comma if at else ""
            after = self.rule(f"{comma} {known[at]} {after}")
            if at >= low:
                after = f'("" | {after})'
        return after

    def _object(self, form: Form, path: str) -> str | None:
        parts = self._members(form, path)
        if parts is None:
            return None
        members, extra = parts
        low, high = form.get("minProperties", 0), form.get("maxProperties")
        required = sum(needed for *_, needed in members)
        if extra is not None and low > required + 1:
            reject(path, "minProperties", "a name may be written twice; declare 'properties'")
        counts = low > required or high is not None
        known: dict[tuple[int, int], str | None] = {}

        def after(at: int, count: int) -> str | None:
            """Return the expression of members ``at`` and later, after ``count`` other members."""
            count = count if counts else min(count, 1)
            if (at, count) not in known:
                body = self._after(members, extra, at, count, (low, high), after)
                known[at, count] = None if body is None else self.rule(body)
            return known[at, count]

        body = after(0, 0)
        return None if body is None else f'"{{" {self._space} {body} {self._space} "}}"'

    def _after(
        self,
        members: list[tuple[str, str, bool]],
        extra: str | None,
        at: int,
        count: int,
        limits: tuple[int, int | None],
        after: Any,
    ) -> str | None:
        comma = self._comma if count else ""
        low, high = limits
        if at < len(members):
            key, value, needed = members[at]
            parts = []
            if (high is None or count < high) and (rest := after(at + 1, count + 1)) is not None:
                parts.append(f"{comma} {key} {self._colon} {value} {rest}")
            if not needed and (rest := after(at + 1, count)) is not None:
                parts.append(rest)
            return one_of(parts)
        least, most = max(0, low - count), None if high is None else high - count
        if extra is None or most == 0:
            return '""' if least == 0 else None
        if count:
            return f"({self._comma} {extra}){times(least, most)}"
        more = times(max(0, least - 1), None if most is None else most - 1)
        some = f"{extra} ({self._comma} {extra}){more}"
        return some if least else f'"" | {some}'

    def _members(
        self, form: Form, path: str
    ) -> tuple[list[tuple[str, str, bool]], str | None] | None:
        """Return the declared properties, and the expression of a member that is not declared.

        Each property is a tuple: the expression of its name, the expression of its value, and
        whether it is required. The result is None if no object is valid.
        """
        properties = dict(form.get("properties", {}))
        patterns = form.get("patternProperties", {})
        additional = form.get("additionalProperties", not is_closed(form) and not patterns)
        required = form.get("required", [])
        names = form.get("propertyNames", True)
        for name in required:
            # A required name that ``properties`` lacks has the schemas of all matching patterns.
            # If no pattern matches, it has the schema ``additionalProperties``.
            matching = [part for pattern, part in patterns.items() if re.search(pattern, name)]
            given = form.get("additionalProperties", True)
            properties.setdefault(name, {"allOf": matching} if matching else given)
        members: list[tuple[str, str, bool]] = []
        never: list[str] = []
        for name, schema in properties.items():
            own = [schema, *(part for one, part in patterns.items() if re.search(one, name))]
            value = None
            if valid(names, name, self.root):
                part: Any = own[0] if len(own) == 1 else {"allOf": own}
                value = self.value(part, f"{path}/properties/{name}")
            if value is None:
                never.append(name)
            else:
                members.append((self.literal(name), value, name in required))
        if any(name in never for name in required):
            return None
        extra = self._extra(form, path, [*properties], patterns, additional)
        return members, extra

    def _extra(
        self,
        form: Form,
        path: str,
        declared: list[str],
        patterns: Mapping[str, Any],
        additional: Any,
    ) -> str | None:
        """Return the expression of an undeclared member, or None if such members are not valid."""
        names = form.get("propertyNames", True)
        if patterns:
            if additional is not False and additional is not True:
                reject(path, "patternProperties", "'additionalProperties' is a schema too")
            if len(patterns) > 1 or names not in (True, {}):
                reject(path, "patternProperties", "a name may match more than one pattern")
            ((pattern, schema),) = patterns.items()
            if any(re.search(pattern, name) for name in declared):
                reject(path, "patternProperties", "a declared name matches the pattern")
            name = self._string({"pattern": pattern}, f"{path}/patternProperties")
            value = self.value(schema, f"{path}/patternProperties/{pattern}")
            return None if value is None else f"{name} {self._colon} {value}"
        value = self.value(additional, f"{path}/additionalProperties")
        if value is None:
            return None
        key: str | None
        if names in (True, {}):
            key = f'"\\"" {self._other_text(declared)}'
        else:
            if any(valid(names, name, self.root) for name in declared):
                reject(path, "propertyNames", "a declared name is one of them")
            only = {"allOf": [names, {"type": "string"}]}
            key = self.value(only, f"{path}/propertyNames")
        return None if key is None else f"{key} {self._colon} {value}"

    def _other_text(self, names: Iterable[str]) -> str:
        """Return the rule for a text that is not one of the names, and its closing quote."""
        names = [*names]
        if not names:
            return self._any_text()
        # An escape could write a declared name in another form, so other names have no escapes.
        rest = self.rule("")
        raw = class_expression(self._raw)
        self._rules[rest] = f'("\\"" | {raw} {rest}) {_FOLLOWS}'

        def without(suffixes: list[str]) -> str:
            """Return the rule for a text that is not one of the suffixes, and its closing quote."""
            parts = [] if "" in suffixes else ['"\\""']
            heads = sorted({suffix[0] for suffix in suffixes if suffix})
            for head in heads:
                after = [suffix[1:] for suffix in suffixes if suffix[:1] == head]
                parts.append(f"{self._as_is(head)} {without(after)}")
            others = complement([(ord(head), ord(head)) for head in heads])
            parts.append(f"{class_expression(intersection(others, self._raw))} {rest}")
            return self._text_rule(" | ".join(parts))

        return without(names)

    def _as_is(self, char: str) -> str:
        return self.char([(ord(char), ord(char))])


def types_of(form: Form) -> list[str]:
    """Return the types of a form's values, without "integer" if "number" is among them."""
    types = form.get("type", TYPES)
    return [one for one in TYPES if one in types and (one != "integer" or "number" not in types)]


def number_expression(range_: Range, kind: str) -> str | None:
    """Return the expression of the numbers in a range, or None if there are none."""
    if not range_.bounded:
        return INTEGER if kind == "integer" else NUMBER
    return integers(range_) if kind == "integer" else decimals(range_)


def text_expression(form: Form, path: str, char: Any) -> str | None:
    """Return the expression of the texts that a form allows, or None if it allows any text.

    Args:
        path: the place of the form in the schema, for errors.
        char: returns the expression of one character of a set.

    Raises:
        InvalidRequest: the pattern cannot be enforced, alone or together with a length.
    """
    low, high = form.get("minLength", 0), form.get("maxLength")
    pattern = form.get("pattern")
    if pattern is None and not low and high is None:
        pattern = _FORMATS.get(form.get("format", ""))
    try:
        if pattern is None:
            return f"{char(ALL)}{times(low, high)}" if low or high is not None else None
        if low or high is not None:
            return _with_length(pattern, low, high, path, char)
        return pattern_expression(pattern, char)
    except UnsupportedPattern as error:
        reject(path, "pattern", str(error))


def _with_length(pattern: str, low: int, high: int | None, path: str, char: Any) -> str:
    """Return the expression of a pattern together with a length."""
    width = pattern_width(pattern)
    if (
        width is not None
        and low <= width[0]
        and (high is None or (width[1] is not None and width[1] <= high))
    ):
        return pattern_expression(pattern, char)
    simple = simple_pattern(pattern)
    if simple is None:
        keyword = "maxLength" if high is not None else "minLength"
        reject(path, keyword, "'pattern' is given too; put the length into the pattern")
    chars, least, most = simple
    least = max(least, low)
    most = high if most is None else most if high is None else min(most, high)
    if most is not None and least > most:
        reject(path, "minLength", "no text has this length and matches the pattern")
    return f"{char(chars)}{times(least, most)}"
