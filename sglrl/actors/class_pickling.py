"""Pickle classes that a worker cannot import.

Examples are an actor in the user's script, and the types that its endpoints take and return.
cloudpickle does most of the work. This module adds support for msgspec's structs.

The pickled bytes are only sent over the private socket between a driver and its own fork server,
and to nodes, which accept them only from their driver.
"""

from __future__ import annotations

import contextlib
import io
import os
import site
import sys
import sysconfig
import typing
from collections.abc import Container, Mapping
from types import CodeType, FunctionType, MappingProxyType, ModuleType
from typing import Any, Final

import cloudpickle
import msgspec

_KNOWN: Final = "__msgspec_cache__"
_METHODS: Final = (FunctionType, classmethod, staticmethod, property)
_CONFIG: Final = (
    "frozen",
    "eq",
    "order",
    "array_like",
    "gc",
    "repr_omit_defaults",
    "omit_defaults",
    "forbid_unknown_fields",
    "weakref",
    "dict",
    "cache_hash",
    "tag",
    "tag_field",
)


def by_value(cls: type, uninstalled: Mapping[str, ModuleType] = MappingProxyType({})) -> bytes:
    """Return the pickled class, for ``cloudpickle.loads``.

    Args:
        cls: the class to pickle.
        uninstalled: modules that the loading process cannot import, by name. Their classes and
            functions are pickled by value, too.
    """
    with io.BytesIO() as file, contextlib.ExitStack() as stack:
        registered = cloudpickle.list_registry_pickle_by_value()
        for name, module in uninstalled.items():
            # A module may also be loaded under other names. cloudpickle uses its ``__name__``.
            if name == module.__name__ and name not in registered:
                cloudpickle.register_pickle_by_value(module)
                stack.callback(cloudpickle.unregister_pickle_by_value, module)
        pickler = _Pickler(file)
        pickler.uninstalled = uninstalled
        pickler.dump(cls)
        return file.getvalue()


def uninstalled_modules() -> dict[str, ModuleType]:
    """Return the loaded modules of the user's program, which belong to no installed package.

    These are the modules outside of the folders of packages and of Python's own library.
    """
    folders = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    folders |= {*site.getsitepackages(), site.getusersitepackages()}
    prefixes = tuple(os.path.realpath(folder) + os.sep for folder in folders)
    modules = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        own = name.partition(".")[0] in ("sglrl", "sglrl_workers", "__main__")
        if isinstance(file, str) and not own and not os.path.realpath(file).startswith(prefixes):
            modules[name] = module
    return modules


def importable_as(cls: type, uninstalled: Container[str] = ()) -> str:
    """Return "module:qualname", or "" if importing this name does not return the class.

    Args:
        uninstalled: names of modules that cannot be imported.
    """
    module = sys.modules.get(cls.__module__)
    if module is None or cls.__module__ == "__main__" or "<" in cls.__qualname__:
        return ""
    if cls.__module__ in uninstalled:
        return ""
    value: Any = module
    for part in cls.__qualname__.split("."):
        value = getattr(value, part, None)
    return f"{cls.__module__}:{cls.__qualname__}" if value is cls else ""


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    uninstalled: Container[str] = ()

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, CodeType):
            # cloudpickle 3.1.3 drops the file name of code, which tracebacks need.
            make, arguments, *_ = self.dispatch_table[CodeType](obj)
            written = obj.co_filename
            if not written.startswith("<"):
                # Make the path absolute, because the worker runs in another folder.
                written = os.path.abspath(written)
            return _code, (make, arguments, written)
        if not isinstance(obj, type) or importable_as(obj, self.uninstalled):
            return super().reducer_override(obj)
        if _KNOWN in vars(obj):
            # msgspec's cache cannot be pickled. msgspec computes it again when needed.
            delattr(obj, _KNOWN)
        if isinstance(obj, type(msgspec.Struct)):
            return _struct(obj)
        for annotated in (obj, *vars(obj).values()):
            if isinstance(annotated, (type, FunctionType)):
                _resolve(annotated)
        return super().reducer_override(obj)


def _resolve(annotated: Any) -> None:
    """Replace text annotations by types, because the worker cannot resolve names in a text."""
    if isinstance(annotated, FunctionType):
        own = annotated.__annotations__
    else:
        own = vars(annotated).get("__annotations__", {})
    if any(isinstance(hint, str) for hint in own.values()):
        # An annotation that cannot be resolved does not belong to an endpoint, because endpoints
        # with such annotations are rejected earlier.
        with contextlib.suppress(NameError):
            hints = typing.get_type_hints(annotated, include_extras=True)
            annotated.__annotations__ = {name: hints[name] for name in own}


def _code(make: Any, arguments: tuple[Any, ...], filename: str) -> CodeType:
    code: CodeType = make(*arguments)
    return code.replace(co_filename=filename)


def _struct(cls: Any) -> Any:
    """Return the reduction of a ``Struct`` class, from which pickle creates the class again.

    msgspec creates the fields of a class from its annotations when the class is created.
    cloudpickle alone would set the annotations only after that.
    """
    own = vars(cls).get("__annotations__", {})
    fields: list[Any] = []
    optional = kw_only = False
    for info in msgspec.structs.fields(cls):
        if info.name not in own:
            # The field belongs to a base class.
            continue
        given: dict[str, Any] = {}
        if info.default is not msgspec.NODEFAULT:
            given["default"] = info.default
        elif info.default_factory is not msgspec.NODEFAULT:
            given["default_factory"] = info.default_factory
        kw_only |= optional and not given
        optional |= bool(given)
        if info.encode_name != info.name:
            given["name"] = info.encode_name
        fields.append((info.name, info.type, given))
    config = {name: getattr(cls.__struct_config__, name) for name in _CONFIG}
    methods = {name: value for name, value in vars(cls).items() if isinstance(value, _METHODS)}
    early = {"__post_init__": methods.pop("__post_init__")} if "__post_init__" in methods else {}
    made = (cls.__name__, fields, cls.__bases__, cls.__module__, early, kw_only, config)
    return _make_struct, made, methods, None, None, _set_methods


def _make_struct(
    name: str,
    fields: list[Any],
    bases: tuple[type, ...],
    module: str,
    namespace: dict[str, Any],
    kw_only: bool,
    config: dict[str, Any],
) -> type:
    return msgspec.defstruct(
        name,
        [(n, hint, msgspec.field(**given)) if given else (n, hint) for n, hint, given in fields],
        bases=bases,
        module=module,
        namespace=namespace,
        kw_only=kw_only,
        **config,
    )


def _set_methods(cls: type, methods: dict[str, Any]) -> None:
    for name, value in methods.items():
        setattr(cls, name, value)
