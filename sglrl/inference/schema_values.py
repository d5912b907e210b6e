"""Check JSON values against a JSON schema, for the keywords that grammars enforce."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

TYPES: Final = ("null", "boolean", "integer", "number", "string", "array", "object")


def resolve(root: Any, reference: Any) -> Any:
    """Return the part of a schema that a ``$ref`` names.

    Raises:
        KeyError: there is no such part.
    """
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        raise KeyError(reference)
    value = root
    for part in reference.split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(value, list) and name.isdecimal() and int(name) < len(value):
            value = value[int(name)]
        elif isinstance(value, Mapping) and name in value:
            value = value[name]
        else:
            raise KeyError(reference)
    return value


def type_of(value: Any) -> str:
    """Return the JSON type of a value. A float without a fraction is an integer."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "integer" if value.is_integer() else "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"


def same(first: Any, second: Any) -> bool:
    """Return whether two JSON values are equal. Unlike in Python, true does not equal 1."""
    if isinstance(first, bool) or isinstance(second, bool):
        return first is second
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(same, first, second))
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return first.keys() == second.keys() and all(same(first[k], second[k]) for k in first)
    return bool(first == second)


def valid(schema: Any, value: Any, root: Any) -> bool:
    """Return whether a value is valid for a schema.

    Args:
        root: the schema that contains the targets of ``$ref``.
    """
    if not isinstance(schema, Mapping):
        return schema is not False
    kind = type_of(value)
    types = schema.get("type")
    if types is not None:
        types = [types] if isinstance(types, str) else types
        if kind not in types and not (kind == "integer" and "number" in types):
            return False
    if "$ref" in schema and not valid(resolve(root, schema["$ref"]), value, root):
        return False
    if "const" in schema and not same(schema["const"], value):
        return False
    if "enum" in schema and not any(same(one, value) for one in schema["enum"]):
        return False
    if not all(valid(part, value, root) for part in schema.get("allOf", ())):
        return False
    if "anyOf" in schema and not any(valid(part, value, root) for part in schema["anyOf"]):
        return False
    if "oneOf" in schema and sum(valid(part, value, root) for part in schema["oneOf"]) != 1:
        return False
    if kind in ("integer", "number"):
        return _number(schema, value)
    if kind == "string":
        low, high = schema.get("minLength", 0), schema.get("maxLength")
        return (
            len(value) >= low
            and (high is None or len(value) <= high)
            and ("pattern" not in schema or re.search(schema["pattern"], value) is not None)
        )
    if kind == "array":
        return _array(schema, value, root)
    return kind != "object" or _object(schema, value, root)


def _number(schema: Mapping[str, Any], value: float) -> bool:
    return (
        ("minimum" not in schema or value >= schema["minimum"])
        and ("maximum" not in schema or value <= schema["maximum"])
        and ("exclusiveMinimum" not in schema or value > schema["exclusiveMinimum"])
        and ("exclusiveMaximum" not in schema or value < schema["exclusiveMaximum"])
    )


def _array(schema: Mapping[str, Any], value: list[Any], root: Any) -> bool:
    first = schema.get("prefixItems", ())
    rest = schema.get("items", True)
    return (
        len(value) >= schema.get("minItems", 0)
        and ("maxItems" not in schema or len(value) <= schema["maxItems"])
        and all(valid(part, one, root) for part, one in zip(first, value, strict=False))
        and all(valid(rest, one, root) for one in value[len(first) :])
    )


def _object(schema: Mapping[str, Any], value: Mapping[str, Any], root: Any) -> bool:
    properties = schema.get("properties", {})
    patterns = schema.get("patternProperties", {})
    names = schema.get("propertyNames", True)
    if any(name not in value for name in schema.get("required", ())):
        return False
    if len(value) < schema.get("minProperties", 0):
        return False
    if "maxProperties" in schema and len(value) > schema["maxProperties"]:
        return False
    for name, one in value.items():
        parts = [properties[name]] if name in properties else []
        parts += [part for pattern, part in patterns.items() if re.search(pattern, name)]
        if not parts:
            parts = [schema.get("additionalProperties", True)]
        if not valid(names, name, root) or not all(valid(part, one, root) for part in parts):
            return False
    return True
