"""The reasoning at the beginning of a turn: how it is opened and closed, and if it is open.

Everything is found by asking the renderer how it reads tokens, so a grammar begins exactly where
the renderer reads the first token of the content.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, NamedTuple

from .renderer import Renderer

_USUAL: Final = ("<think>\n", "</think>", "\n\n")
"""The markers of most models: for a renderer that cannot write the example."""
_EXAMPLE: Final = re.compile(
    r"(?P<opening>.*?)Hm\.\s*(?P<closing><[^<\s]*>)(?P<space>\s*)", re.DOTALL
)
_TAIL: Final = 32
"""Tokens at the end of a prompt in which the end of an empty thought is searched."""


class Thought(NamedTuple):
    """Reasoning that comes before the content of a turn.

    Attributes:
        opening: the text that opens it; "": the prompt has opened it.
        closing: the text that closes it.
        space: white space that may follow, and that is not part of the content.
    """

    opening: str
    closing: str
    space: str


def thought_after(renderer: Renderer, prompt: list[int]) -> Thought | None:
    """Return the reasoning that a turn may begin with.

    Args:
        prompt: the tokens before the turn.

    Returns:
        None if the turn begins with its content: the model does not reason, the reasoning is over,
        or the prompt ends within the assistant's message. With an ``opening``, the model decides
        whether it reasons.
    """
    opened = renderer.is_reasoning(prompt)
    if not opened and not renderer.begins_turn(prompt):
        return None
    example = renderer.example(1) or ""
    match = _EXAMPLE.match(example)
    pairs = [match.group("opening", "closing", "space")] if match else []
    for opening, closing, space in [*pairs, _USUAL]:
        if opened:
            opening = ""
        elif not opening.strip() or _ends_with(renderer, prompt, closing):
            continue
        if not _reads(renderer, prompt, f"{opening}Hm.{closing}"):
            continue
        spaced = _reads(renderer, prompt, f"{opening}Hm.{closing}{space}")
        return Thought(opening, closing, space if spaced else "")
    return None


def _reads(renderer: Renderer, prompt: list[int], thought: str) -> bool:
    """Return whether the renderer reads a text as a whole thought."""
    said = renderer.parse(prompt, renderer.encode(f"{thought}5"), 0)
    return said.content == "5" and "Hm." in (said.reasoning_content or "")


def _ends_with(renderer: Renderer, prompt: Sequence[int], closing: str) -> bool:
    """Return whether a prompt ends with a thought: that of a model that shall not reason."""
    return renderer.decode(prompt[-_TAIL:]).rstrip().endswith(closing)
