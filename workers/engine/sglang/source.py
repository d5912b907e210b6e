"""Read SGLang's source from its files. An import of SGLang would take 20 seconds."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
from functools import cache
from pathlib import Path
from typing import Any


def sglang_folder() -> Path:
    """Return the folder of the installed package ``sglang``.

    Raises:
        ModuleNotFoundError: SGLang is not installed.
    """
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("sglang is not installed", name="sglang")
    return Path(spec.submodule_search_locations[0])


def digest(target: str, folder: Path) -> str:
    """Return a digest of the source of one definition: 16 hexadecimal digits of its SHA-256.

    Args:
        target: "module:Name" or "module:Class.name", for example
            "sglang.srt.layers.sampler:Sampler.forward". The definition is a function, a class, an
            assignment or an import.
        folder: the folder of the package ``sglang``.

    Returns:
        The digest, or "" if the definition does not exist.
    """
    module, _, name = target.partition(":")
    path = folder.joinpath(*module.split(".")[1:]).with_suffix(".py")
    return _digests(path).get(name, "")


@cache
def _digests(path: Path) -> dict[str, str]:
    """Return the digests of all definitions in a module and its classes.

    Only the digests stay in memory, because every worker inherits them from the fork server. The
    syntax trees of SGLang's modules would take 40 MB.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    lines = text.splitlines(keepends=True)
    sources: dict[str, str] = {}

    def add(node: Any, prefix: str = "") -> None:
        source = "".join(lines[_first_line(node) - 1 : node.end_lineno])
        for name in _names(node):
            # A name may be defined more than once, for example for several platforms.
            sources[prefix + name] = sources.get(prefix + name, "") + source

    for node in ast.parse(text).body:
        add(node)
        if isinstance(node, ast.ClassDef):
            for child in node.body:
                add(child, f"{node.name}.")
    return {
        name: hashlib.sha256(source.encode()).hexdigest()[:16] for name, source in sources.items()
    }


def _names(node: ast.AST) -> set[str]:
    """Return the names that a statement defines. A block defines the names of its parts."""
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return {name}
        case ast.Assign(targets=targets):
            return {target.id for target in targets if isinstance(target, ast.Name)}
        case ast.AnnAssign(target=ast.Name(id=name)):
            return {name}
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            return {(alias.asname or alias.name).partition(".")[0] for alias in names}
        case ast.If(body=body, orelse=other):
            return {name for child in (*body, *other) for name in _names(child)}
        case ast.Try(body=body, orelse=other, handlers=handlers):
            children = [*body, *other, *(child for handler in handlers for child in handler.body)]
            return {name for child in children for name in _names(child)}
        case _:
            return set()


def _first_line(node: Any) -> int:
    """Return the first line of a definition, including its decorators."""
    decorators = getattr(node, "decorator_list", [])
    return min([int(node.lineno), *(int(decorator.lineno) for decorator in decorators)])
