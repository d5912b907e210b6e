"""Find the examples in the documents, for the tests that run them."""

from __future__ import annotations

import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"
DOCS = README.parent / "docs"


def example(word: str, document: Path = README) -> str:
    """Return the only block of Python code that contains this word."""
    blocks = re.findall(r"```python\n(.*?)```", document.read_text(), re.DOTALL)
    (found,) = [block for block in blocks if word in block]
    return str(found)
