"""No file is read or written in the encoding of the locale, which is ASCII with ``LC_ALL=C``."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = {"read_text", "write_text", "TextIOWrapper"}
OPEN = {"open", "fdopen", "NamedTemporaryFile", "TemporaryFile"}


def _name(call: ast.Call) -> str:
    function = call.func
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _arguments(call: ast.Call) -> list[ast.expr]:
    """Return the expressions that may be a mode: ``Path.open`` takes it first, ``open`` second."""
    return [*call.args[:2], *(k.value for k in call.keywords if k.arg == "mode")]


def _is_mode(value: ast.expr) -> bool:
    text = value.value if isinstance(value, ast.Constant) else None
    return isinstance(text, str) and bool(text) and set(text) <= set("rwaxbt+")


def _is_binary(call: ast.Call, name: str) -> bool:
    modes = [ast.literal_eval(value) for value in _arguments(call) if _is_mode(value)]
    binary = name in ("NamedTemporaryFile", "TemporaryFile") and not modes
    return binary or any("b" in mode for mode in modes)


def locale_dependent(code: str) -> Iterator[int]:
    """Yield the lines of calls that use text, but name no encoding."""
    for node in ast.walk(ast.parse(code)):
        if not isinstance(node, ast.Call):
            continue
        given = {k.arg for k in node.keywords}
        if "encoding" in given or None in given:
            continue
        name = _name(node)
        takes_text = any(
            k.arg in ("text", "universal_newlines") and getattr(k.value, "value", None) is True
            for k in node.keywords
        )
        method = isinstance(node.func, ast.Attribute)
        opens = name in OPEN and not _is_binary(node, name)
        if name == "open" and method:
            # Without a mode, this is probably no file: other objects can be opened, too.
            opens = opens and any(_is_mode(value) for value in _arguments(node))
        if name in TEXT or takes_text or opens:
            yield node.lineno


@pytest.mark.parametrize("folder", ["sglrl", "workers", "bench", "examples"])
def test_every_text_names_its_encoding(folder: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line in locale_dependent(path.read_text(encoding="utf-8"))
    ]
    assert found == []


@pytest.mark.parametrize(
    ("code", "depends"),
    [
        ("open(path)", True),
        ("open(path, 'rb')", False),
        ("path.open('wb')", False),
        ("path.open('w')", True),
        ("path.open(mode='a', encoding='utf-8')", False),
        ("path.read_text()", True),
        ("os.open(path, flags)", False),
        ("subprocess.run(command, text=True)", True),
        ("subprocess.run(command, text=True, encoding='utf-8')", False),
        ("NamedTemporaryFile()", False),
        ("NamedTemporaryFile('w')", True),
    ],
)
def test_the_check_itself(code: str, depends: bool) -> None:
    assert [*locale_dependent(code)] == [1] * depends
