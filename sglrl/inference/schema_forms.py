"""Expand a JSON schema to alternatives without ``$ref``, ``allOf``, ``anyOf`` and ``oneOf``."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final, NoReturn, TypeAlias

from ..errors import InvalidRequest
from .schema_values import TYPES, resolve, same, valid

Form: TypeAlias = dict[str, Any]
"""A schema without references and combinations. Its "type", if any, is a list."""

_MOST: Final = 256
"""The maximum number of alternatives."""
_OF_TYPE: Final = {
    "multipleOf": ("integer", "number"),
    "uniqueItems": ("array",),
    "contains": ("array",),
    "dependentRequired": ("object",),
    "dependentSchemas": ("object",),
    "dependencies": ("object",),
}
_NEVER: Final = ("not", "if", "$dynamicRef", "$recursiveRef", *_OF_TYPE)
"""Keywords that no grammar can enforce."""
_KEPT: Final = (
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    *("minLength", "maxLength", "pattern", "format"),
    *("minItems", "maxItems", "prefixItems", "items"),
    *("minProperties", "maxProperties", "properties", "required", "additionalProperties"),
    *("patternProperties", "propertyNames", "enum", "type"),
)
_COUNTS: Final = (
    *("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
)
_LARGEST: Final = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")
_SMALLEST: Final = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")


def reject(path: str, keyword: str, why: str) -> NoReturn:
    """Raise ``InvalidRequest`` for a keyword that cannot be enforced."""
    raise InvalidRequest(f"json_schema: {keyword!r} at {path or '/'} cannot be enforced: {why}")


class Forms:
    """Expands the parts of a schema to alternatives.

    Args:
        root: the whole schema, which contains the targets of ``$ref``.
    """

    def __init__(self, root: Any) -> None:
        self.root = root

    def alternatives(self, schema: Any, path: str, seen: tuple[str, ...] = ()) -> list[Form]:
        """Return the forms of a schema. A value is valid if it is valid for one of the forms.

        Args:
            path: the place of the schema in the root, for errors.
            seen: the references that led to this schema.

        Raises:
            InvalidRequest: a keyword cannot be enforced.
        """
        if isinstance(schema, bool):
            return [{}] if schema else []
        if not isinstance(schema, Mapping):
            raise InvalidRequest(f"json_schema: {path or '/'} must be a schema, got {schema!r:.99}")
        forms = [self._own(schema, path)]
        if "$ref" in schema:
            reference = schema["$ref"]
            try:
                target = resolve(self.root, reference)
            except KeyError:
                reject(path, "$ref", f"{reference!r:.99} is not a part of the schema")
            if reference in seen:
                reject(path, "$ref", f"{reference!r:.99} refers to itself")
            others = self.alternatives(target, path, (*seen, reference))
            forms = self._both(forms, others, path)
        for i, part in enumerate(schema.get("allOf", ())):
            forms = self._both(forms, self.alternatives(part, f"{path}/allOf/{i}", seen), path)
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                branches = [
                    self.alternatives(part, f"{path}/{keyword}/{i}", seen)
                    for i, part in enumerate(schema[keyword])
                ]
                if keyword == "oneOf":
                    self._check_disjoint(branches, path)
                forms = self._both(forms, [form for branch in branches for form in branch], path)
        return forms

    def _own(self, schema: Mapping[str, Any], path: str) -> Form:
        """Return the form of a schema without its references and combinations."""
        form = {name: schema[name] for name in _KEPT if name in schema}
        if "type" in form:
            given = form["type"]
            form["type"] = [given] if isinstance(given, str) else [*given]
            if wrong := [one for one in form["type"] if one not in TYPES]:
                raise InvalidRequest(f"json_schema: {path}/type {wrong[0]!r:.99} is not a type")
        for keyword in _COUNTS:
            count = form.get(keyword, 0)
            if type(count) is not int or count < 0:
                raise InvalidRequest(f"json_schema: {path}/{keyword} {count!r:.99} is not a count")
        for keyword in _NEVER:
            if keyword in schema and not _harmless(keyword, schema[keyword], form):
                reject(path, keyword, "omit it, or check the answer yourself")
        if "const" in schema:
            values = form.get("enum", [schema["const"]])
            form["enum"] = [one for one in values if same(one, schema["const"])]
        for end, strict in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
            # In draft 4, the exclusive keywords are flags of ``minimum`` and ``maximum``.
            if isinstance(form.get(strict), bool) and form.pop(strict) and end in form:
                form[strict] = form.pop(end)
        if isinstance(form.get("items"), list):
            # Before draft 2020-12, ``items`` with a list as its value means ``prefixItems``.
            form["prefixItems"] = form.pop("items")
            if "additionalItems" in schema:
                form["items"] = schema["additionalItems"]
        if "unevaluatedItems" in schema and "items" not in form:
            form["items"] = schema["unevaluatedItems"]
        if "unevaluatedProperties" in schema and "additionalProperties" not in form:
            form["additionalProperties"] = schema["unevaluatedProperties"]
        return form

    def _both(self, first: list[Form], second: list[Form], path: str) -> list[Form]:
        pairs = [_conjunction(one, other, path) for one in first for other in second]
        forms = [form for form in pairs if form is not None]
        if len(forms) > _MOST:
            raise InvalidRequest(f"json_schema: {path or '/'} has more than {_MOST} alternatives")
        return forms

    def _check_disjoint(self, branches: list[list[Form]], path: str) -> None:
        """Raise ``InvalidRequest`` if a value that the grammar allows may fit two branches."""
        for i, branch in enumerate(branches):
            for form in branch:
                for j, others in enumerate(branches):
                    if i != j and not all(self._excludes(form, other) for other in others):
                        reject(
                            path,
                            "oneOf",
                            f"a value may be valid for its branches {i} and {j}; use 'anyOf', or "
                            "give the branches a property with different constants",
                        )

    def _excludes(self, written: Form, other: Form) -> bool:
        """Return True if no value that the grammar of ``written`` allows is valid for ``other``.

        False: this is not certain.
        """
        if "enum" in written:
            values = [one for one in written["enum"] if valid(written, one, self.root)]
            return not any(valid(other, one, self.root) for one in values)
        both = _conjunction(written, other, "")
        if both is None or ("enum" in both and not both["enum"]):
            return True
        if both.get("type") == [] or both.get("type") != ["object"]:
            return both.get("type") == []
        # The grammar of a closed form allows only declared properties.
        names = written.get("properties", {})
        if is_closed(written) and not set(other.get("required", ())) <= names.keys():
            return True
        for name in {*written.get("required", ()), *other.get("required", ())}:
            parts = [form.get("properties", {}).get(name) for form in (written, other)]
            if None not in parts and self._differ(*parts):
                return True
        return False

    def _differ(self, first: Any, second: Any) -> bool:
        """Return True if no value is valid for both schemas. False: this is not certain."""
        try:
            forms = self.alternatives({"allOf": [first, second]}, "")
        except InvalidRequest:
            return False
        return all(
            form.get("type") == []
            or ("enum" in form and not any(valid(form, one, self.root) for one in form["enum"]))
            for form in forms
        )


def _harmless(keyword: str, value: Any, form: Form) -> bool:
    """Return whether a keyword can be ignored.

    For ``multipleOf: 1``, this function replaces the form's type "number" by "integer".
    """
    types = _OF_TYPE.get(keyword)
    if types and form.get("type") and not set(types) & set(form["type"]):
        return True
    if keyword == "uniqueItems":
        return value is False or form.get("maxItems", 2) < 2
    if keyword == "multipleOf" and value == 1:
        if "number" in form.get("type", TYPES):
            form["type"] = [one for one in form.get("type", TYPES) if one != "number"]
            form["type"] += [] if "integer" in form["type"] else ["integer"]
        return True
    return keyword in ("dependentRequired", "dependentSchemas", "dependencies") and not value


def is_closed(form: Form) -> bool:
    """Return whether the grammar of a form allows only declared properties."""
    if "additionalProperties" in form:
        return form["additionalProperties"] is False and "patternProperties" not in form
    return "properties" in form and "patternProperties" not in form


def _conjunction(first: Form, second: Form, path: str) -> Form | None:
    """Return the form of the values that are valid for both forms, or None if there are none."""
    if not first or not second:
        return {**first, **second}
    form = {**first, **second}
    both = first.keys() & second.keys()
    if "type" in both:
        form["type"] = _common_types(first["type"], second["type"])
        if not form["type"]:
            return None
    if "enum" in both:
        others = second["enum"]
        form["enum"] = [one for one in first["enum"] if any(same(one, two) for two in others)]
        if not form["enum"]:
            return None
    for name in both & set(_LARGEST):
        form[name] = max(first[name], second[name])
    for name in both & set(_SMALLEST):
        form[name] = min(first[name], second[name])
    for name in both & {"propertyNames", "additionalProperties"}:
        form[name] = _all_of(first[name], second[name])
    if "pattern" in both and first["pattern"] != second["pattern"]:
        reject(path, "pattern", "there are two patterns for one text")
    if "required" in both:
        form["required"] = list(dict.fromkeys([*first["required"], *second["required"]]))
    if {"properties", "patternProperties"} & form.keys():
        form.update(_properties(first, second, path))
    if {"prefixItems", "items"} & both:
        form.update(_items(first, second))
    elif "prefixItems" in form and "items" in form:
        # The ``items`` of one form also apply to the ``prefixItems`` of the other.
        form.update(_items(first, second))
    return form


def _common_types(first: list[str], second: list[str]) -> list[str]:
    def has(types: list[str], one: str) -> bool:
        return one in types or (one == "integer" and "number" in types)

    common = [one for one in TYPES if has(first, one) and has(second, one)]
    return [one for one in common if one != "integer" or "number" not in common]


def _all_of(first: Any, second: Any) -> Any:
    if first is True or first == {} or first == second:
        return second
    if second is True or second == {}:
        return first
    if first is False or second is False:
        return False
    # Sort the parts, so that the same parts always give the same schema.
    parts: list[Any] = []
    for one in (first, second):
        alone = isinstance(one, Mapping) and [*one] == ["allOf"]
        parts += one["allOf"] if alone else [one]
    unique = {json.dumps(one, sort_keys=True): one for one in parts}
    return {"allOf": [unique[key] for key in sorted(unique)]}


def _properties(first: Form, second: Form, path: str) -> Form:
    patterns = dict(first.get("patternProperties", {}))
    for name, schema in second.get("patternProperties", {}).items():
        patterns[name] = _all_of(patterns.get(name, True), schema)
    properties: dict[str, Any] = {}
    names = [*first.get("properties", ()), *second.get("properties", ())]
    for name in dict.fromkeys(names):
        properties[name] = _all_of(_property(first, name), _property(second, name))
    form: Form = {"properties": properties} if "properties" in {**first, **second} else {}
    if patterns:
        form["patternProperties"] = patterns
        limited = any(one.get("additionalProperties", True) is not True for one in (first, second))
        if limited and first.get("patternProperties") != second.get("patternProperties"):
            reject(path, "patternProperties", "another branch has 'additionalProperties'")
    return form


def _property(form: Form, name: str) -> Any:
    """Return the schema of one property.

    If the form does not declare the property, this is the schema from ``patternProperties`` or
    ``additionalProperties``.
    """
    schemas = [form["properties"][name]] if name in form.get("properties", {}) else []
    patterns = form.get("patternProperties", {})
    schemas += [schema for pattern, schema in patterns.items() if re.search(pattern, name)]
    if not schemas:
        return form.get("additionalProperties", True)
    schema: Any = True
    for one in schemas:
        schema = _all_of(schema, one)
    return schema


def _items(first: Form, second: Form) -> Form:
    lists = [form.get("prefixItems", []) for form in (first, second)]
    rests = [form.get("items", True) for form in (first, second)]
    count = max(map(len, lists))
    padded = [[*one, *[rest] * (count - len(one))] for one, rest in zip(lists, rests, strict=True)]
    form: Form = {}
    if count:
        form["prefixItems"] = [_all_of(one, two) for one, two in zip(*padded, strict=True)]
    if "items" in first or "items" in second:
        form["items"] = _all_of(*rests)
    return form
