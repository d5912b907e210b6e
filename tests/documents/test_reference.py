"""The tables of names in ``docs/reference`` have the first sentences of the docstrings."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = runpy.run_path(str(ROOT / "docs/site/reference.py"))
PAGES = sorted((ROOT / "docs/reference").glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_a_page_of_the_reference_is_up_to_date(page: Path) -> None:
    text = page.read_text()
    assert SCRIPT["with_tables"](text) == text, "run `python docs/site/reference.py`"


def test_a_reader_of_the_repository_finds_every_name() -> None:
    """A page has a row for each entry, and a description in it."""
    for page in PAGES:
        entries = [line for line in page.read_text().splitlines() if line.startswith("::: ")]
        for entry in set(entries) - {"::: sglrl.errors"}:
            (row,) = [
                line
                for line in page.read_text().splitlines()
                if line.startswith(f"| [`{entry.removeprefix('::: ')}`](")
            ]
            assert len(row.split("|")[2]) > 10, row


def test_methods_of_base_classes_are_listed() -> None:
    text = (ROOT / "docs/reference/client.md").read_text()
    for method in ("generate", "update_weights", "pause", "score", "workers", "close"):
        assert text.count(f"| `Client.{method}` | ") == 1
