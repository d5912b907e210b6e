"""A griffe extension for the conventions of the docstrings in this repository.

- An indented example after a line with ``::`` is a block of Python code.
- An entry of "Args" or "Attributes" may describe several names: ``keys, insecure: ...``.
- The first sentence of "Returns" may contain a colon. griffe takes the text before it for a type.
"""

from __future__ import annotations

import re
from textwrap import dedent
from typing import Any

import griffe

_BLOCK = re.compile(r"^::\n\n((?: {4}.*\n|\n)* {4}.*)", re.MULTILINE)
_SECTION = re.compile(r"^(?:Args|Attributes):\n(?: {4}.*\n?|\n)+", re.MULTILINE)
_NAME = r"\*{0,2}\w+"
_ENTRY = re.compile(
    rf"^ {{4}}(?P<first>{_NAME})(?P<more>(?:, {_NAME})+):(?P<text>.*(?:\n {{8}}.*)*)", re.MULTILINE
)
_RETURNS = re.compile(r"^(Returns:\n {4}(?!float32 ?\[)[^:\n]+):", re.MULTILINE)


def _block(found: re.Match[str]) -> str:
    code = found[1]
    language = "text" if "──" in code else "python"
    return f"```{language}\n{dedent(code)}\n```"


def _entries(found: re.Match[str]) -> str:
    first, text = found["first"], found["text"]
    entries = [f"    {first}:{text}"]
    again = f" see ``{first}``." if "\n" in text else text
    entries += [f"    {name}:{again}" for name in found["more"].split(", ")[1:]]
    return "\n".join(entries)


class Docstrings(griffe.Extension):
    """Rewrite the docstring of each object that griffe loads."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            text = _BLOCK.sub(_block, obj.docstring.value)
            text = _SECTION.sub(lambda found: _ENTRY.sub(_entries, found[0]), text)
            obj.docstring.value = _RETURNS.sub(r"\1 –", text)
