"""Write the tables in the pages of ``docs/reference``.

Tables of names have the first sentences of the docstrings. The site shows the whole docstrings. A
reader of the repository sees these tables. Tables of sampling parameters follow from their
declaration in ``sglrl/inference/sampling.py``:

    python docs/site/reference.py

``tests/documents/test_reference.py`` checks that they are up to date. No module with names in a
table is imported, because some need torch.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from sglrl.inference.sampling import FIELDS
from sglrl.inference.sampling_fields import DIALECTS
from sglrl.tools.sampling_options import OPTIONS, option_default, option_names, option_text

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs/reference"
_TABLE = re.compile(r"^\| name \| description \|\n(?:\|.*\n)+\n", re.MULTILINE)
_ENTRIES = re.compile(r"^(?:::: (?!sglrl\.errors$)\S+\n(?: {4,}.*\n)*\n?)+", re.MULTILINE)
_PARAMETERS = re.compile(r"^(\| parameter \|.*\n\|---.*\n)(?:\|.*\n)*", re.MULTILINE)
_OPTIONS = re.compile(r"^(\| sampling option \|.*\n\|---.*\n)(?:\|.*\n)*", re.MULTILINE)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class Found(NamedTuple):
    """A class or a function, and the file that defines it."""

    file: Path
    node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def _file(module: str) -> Path:
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _find(module: str, name: str) -> Found | None:
    """Follow the imports of a name to its definition. None: it is not in this repository."""
    file = _file(module)
    for node in ast.walk(_tree(file)) if file.exists() else ():
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if node.name == name and not _is_overload(node):
                return Found(file, node)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if name == (alias.asname or alias.name):
                    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
                    above = package.split(".")[: len(package.split(".")) - node.level + 1]
                    of = [*above, node.module or ""] if node.level else [node.module or ""]
                    return _find(".".join(filter(None, of)), alias.name)
    return None


def _is_overload(node: ast.AST) -> bool:
    return "overload" in [ast.unparse(made) for made in getattr(node, "decorator_list", ())]


def _methods(module: str, node: ast.ClassDef) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield the public methods and properties of a class, and of its bases in this repository."""
    for member in node.body:
        if isinstance(member, _FUNCTIONS) and member.name[0] != "_" and not _is_overload(member):
            yield member
    for base in node.bases:
        found = _find(module, ast.unparse(base).partition("[")[0])
        if found is not None and isinstance(found.node, ast.ClassDef):
            parts = found.file.relative_to(ROOT).with_suffix("").parts
            yield from _methods(".".join(parts), found.node)


def _sentence(node: ast.AST) -> str:
    """Return the first sentence of a docstring, in Markdown."""
    text = ast.get_docstring(node) or ""  # type: ignore[arg-type]
    text = " ".join(text.split("\n\n")[0].split()).replace("``", "`").replace("|", "\\|")
    return re.split(r"(?<=[.:]) (?=[A-Z])", text)[0].removesuffix("::").removesuffix(":")


def _rows(entry: str) -> Iterator[str]:
    module, _, name = entry.rpartition(".")
    found = _find(module, name)
    assert found is not None, entry
    file = found.file.relative_to(ROOT)
    yield f"| [`{entry}`](../../{file}) | {_sentence(found.node)} |"
    if isinstance(found.node, ast.ClassDef):
        own = ".".join(file.with_suffix("").parts)
        methods = {node.name: node for node in reversed([*_methods(own, found.node)])}
        for method in reversed(methods.values()):
            sentence = _sentence(method)
            if sentence and not sentence.startswith("See `"):
                yield f"| `{name}.{method.name}` | {sentence} |"


def _names(names: Iterable[str], own: str = "") -> str:
    return ", ".join("=" if name == own else f"`{name}`" for name in names)


def _parameter_rows() -> str:
    """Return a row for each sampling parameter, with its names."""
    rows = []
    for field in FIELDS.values():
        options = option_names(field) if field in OPTIONS else []
        cells = [_names([field.name]), _names(field.names.aliases), _names(options)]
        cells += [_names(field.in_dialect(dialect), field.name) for dialect in DIALECTS]
        rows.append(f"| {' | '.join(cells)} |\n")
    return "".join(rows)


def _option_rows() -> str:
    """Return a row for each sampling parameter that is an option of commands."""
    rows = []
    for field in OPTIONS:
        text = option_text(field).replace("|", "\\|")
        rows.append(f"| {_names(option_names(field))} | {option_default(field)} | {text} |\n")
    return "".join(rows)


def with_tables(page: str) -> str:
    """Return a page with a table before each run of entries, and with rows for all parameters."""

    def table(found: re.Match[str]) -> str:
        rows = [row for entry in re.findall(r"^::: (\S+)$", found[0], re.M) for row in _rows(entry)]
        return "\n".join(["| name | description |", "|---|---|", *rows, "", found[0]])

    page = _ENTRIES.sub(table, _TABLE.sub("", page))
    page = _PARAMETERS.sub(lambda found: found[1] + _parameter_rows(), page)
    return _OPTIONS.sub(lambda found: found[1] + _option_rows(), page)


if __name__ == "__main__":
    for file in PAGES.glob("*.md"):
        file.write_text(with_tables(file.read_text()))
