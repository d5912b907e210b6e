"""Read the fields of SGLang's ``ServerArgs`` from its source code.

The module is parsed and not imported, because its import takes 20 s. SGLang declares a field as
``name: A[type, Arg(choices=[...], ...)] = default``.
"""

from __future__ import annotations

import ast
import importlib.util
import typing
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import msgspec

from ..config import install
from ..errors import UsageError

COMPUTED: Final = object()
"""Placeholder for a default value that SGLang computes when the program runs."""
_TYPES: Final = {
    **{kind.__name__: kind for kind in (bool, int, float, str, dict, list)},
    **{name: getattr(typing, name) for name in ("Any", "Dict", "List", "Literal", "Optional")},
    **{name: getattr(typing, name) for name in ("Tuple", "Union")},
    "Callable": Callable,
    # SGLang makes this class from a dict that has a dict for each phase.
    "CudaGraphConfig": dict[str, dict[str, Any]],
}


class EngineField(NamedTuple):
    """One field of ``ServerArgs``.

    Attributes:
        default: the default value, or ``COMPUTED``.
        type: the type of the values. ``Any`` if the type is not known.
        name: the name of the type, for error messages.
        choices: the allowed values. () if every value is allowed.
    """

    default: Any
    type: Any
    name: str
    choices: tuple[Any, ...]

    def check(self, name: str, value: Any) -> None:
        """Check a value of the field.

        Raises:
            UsageError: the value has the wrong type, or is none of the choices.
        """
        if type(value) is type(self.default) and value == self.default:
            return
        if self.choices and isinstance(value, str) and value not in self.choices:
            known = ", ".join(map(repr, self.choices))
            raise UsageError(f"{name} must be one of {known}, got {value!r:.200}")
        try:
            msgspec.convert(value, self.type)
        except (msgspec.ValidationError, TypeError):
            raise UsageError(f"{name} must be {self.name}, got {value!r:.200}") from None


@lru_cache
def engine_fields(sglang: str | None = None) -> Mapping[str, EngineField]:
    """Return all fields of ``ServerArgs`` by name.

    Args:
        sglang: the folder of SGLang's package. None: the installed package.

    Raises:
        UsageError: sglang is not installed, or its source defines no ``ServerArgs``.
    """
    if sglang is None:
        spec = importlib.util.find_spec("sglang")
        if spec is None or not spec.submodule_search_locations:
            raise UsageError(f"sglang is not installed: {install('sglang')}")
        sglang = spec.submodule_search_locations[0]
    source = Path(sglang, "srt")
    main = ast.parse((source / "server_args.py").read_text(encoding="utf-8"))
    named = _constants(main)
    fields = _fields(main, named, "ServerArgs")
    # Newer SGLang versions assemble ServerArgs from the classes in this folder.
    groups = source / "arg_groups"
    if (groups / "choices.py").exists():
        named |= _constants(ast.parse((groups / "choices.py").read_text(encoding="utf-8")))
    for part in sorted((groups / "fields").glob("*.py")):
        fields |= _fields(ast.parse(part.read_text(encoding="utf-8")), named)
    if "model_path" not in fields:
        raise UsageError(f"{source} defines no ServerArgs; this sglang version is not supported")
    return MappingProxyType(fields)


def _constants(module: ast.Module) -> dict[str, Any]:
    """Return the module's constants by name. A value that is not a literal is ``COMPUTED``."""
    return {
        item.targets[0].id: _literal(item.value)
        for item in module.body
        if isinstance(item, ast.Assign) and isinstance(item.targets[0], ast.Name)
    }


def _fields(
    module: ast.Module, named: Mapping[str, Any], only: str | None = None
) -> dict[str, EngineField]:
    """Return the fields that the classes of a module declare.

    Args:
        module: the parsed source of the module.
        named: constants that the declarations may use, by name.
        only: the name of the only class to read. None: read all classes.
    """
    return {
        item.target.id: _field(item, named)
        for node in module.body
        if isinstance(node, ast.ClassDef) and only in (None, node.name)
        for item in node.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }


def _field(item: ast.AnnAssign, named: Mapping[str, Any]) -> EngineField:
    default = COMPUTED if item.value is None else _literal(item.value)
    options: dict[str | None, ast.expr] = {}
    match item.annotation:
        case ast.Subscript(value=ast.Name(id="A"), slice=ast.Tuple(elts=[kind, about, *_])):
            if isinstance(about, ast.Call):
                options = {option.arg: option.value for option in about.keywords}
        case kind:
            pass
    name = ast.unparse(kind)
    try:
        type_ = eval(name, {"__builtins__": {}}, _TYPES)
    except NameError:
        type_ = Any
    if name.startswith("Optional["):
        name = f"{name[len('Optional[') : -1]} or None"
    return EngineField(default, type_, name, _choices(options.get("choices"), named))


def _choices(value: ast.expr | None, named: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the choices that an expression lists.

    The expression is a literal, a name in ``named``, or a sum of such parts. Any other expression
    gives ().
    """
    match value:
        case None:
            return ()
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            parts = [_choices(part, named) for part in (left, right)]
            return (*parts[0], *parts[1]) if all(parts) else ()
        case ast.Name(id=name):
            choices = named.get(name)
        case _:
            choices = _literal(value)
    return tuple(choices) if isinstance(choices, (list, tuple, set)) else ()


def _literal(value: ast.expr) -> Any:
    try:
        return ast.literal_eval(value)
    except ValueError:
        return COMPUTED
