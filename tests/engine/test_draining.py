"""The order of commands and requests in a worker."""

from __future__ import annotations

from .programs import run_program


def test_any_sequence_of_commands() -> None:
    """Every call is answered once, every request finishes, and what drains finds none running."""
    assert run_program("engine.draining_program") == "ok"
