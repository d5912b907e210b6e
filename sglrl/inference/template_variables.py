"""The variables that a chat template reads."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

_OTHERS: Final = ("chat_template", "tools", "documents", "continue_final_message")
"""Arguments of ``apply_chat_template`` that are not only variables of the template."""
_OWN: Final = re.compile(r"\{%[-+]?\s*(end)?generation\s*[-+]?%\}")
"""Blocks that transformers adds to Jinja."""


def read_arguments(template: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that can change what a chat template renders.

    Clients send arguments that only some models have, such as ``enable_thinking``.

    Args:
        template: its text.
        arguments: see ``TokenizerBox.render``.
    """
    names = _variables(template)
    if names is None:
        return dict(arguments)
    return {k: v for k, v in arguments.items() if k in names or k in _OTHERS}


@lru_cache(32)
def _variables(template: str) -> frozenset[str] | None:
    """Return the names of a template's variables, or None if it cannot be parsed."""
    from jinja2 import Environment, TemplateSyntaxError, meta

    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        return frozenset(meta.find_undeclared_variables(environment.parse(_OWN.sub("", template))))
    except TemplateSyntaxError:
        return None
