"""Find the texts around the reasoning of a turn, and whether the prompt has opened the reasoning.

These texts, the markers, are tested with the renderer's own parser. So the grammar for the content
begins exactly at the token that the renderer reads as the first token of the content.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, NamedTuple

from .renderer import Renderer

_USUAL: Final = ("<think>\n", "</think>", "\n\n")
"""The markers of most models. They are tried after the markers in the renderer's example."""
_EXAMPLE: Final = re.compile(
    r"(?P<opening>.*?)Hm\.\s*(?P<closing><[^<\s]*>)(?P<space>\s*)", re.DOTALL
)
_TAIL: Final = 32
"""The number of last tokens of a prompt that are searched for the end of empty reasoning."""


class Thought(NamedTuple):
    """The texts around the reasoning before the content of a turn.

    Attributes:
        opening: the text that opens the reasoning, or "" if the prompt has opened it.
        closing: the text that closes the reasoning.
        space: the white space that may follow and is not a part of the content.
    """

    opening: str
    closing: str
    space: str


def thought_after(renderer: Renderer, prompt: list[int]) -> Thought | None:
    """Return the markers of the reasoning with which a turn may begin, or None.

    If the result has an ``opening``, the model decides whether it reasons. The result is None if
    the turn begins with its content. This is the case if the model does not reason, if the prompt
    has closed the reasoning, or if the prompt ends within the assistant's message.

    Args:
        prompt: the tokens before the turn.
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
    """Return whether the renderer parses a text as complete reasoning."""
    said = renderer.parse(prompt, renderer.encode(f"{thought}5"), 0)
    return said.content == "5" and "Hm." in (said.reasoning_content or "")


def _ends_with(renderer: Renderer, prompt: Sequence[int], closing: str) -> bool:
    """Return whether a prompt ends with closed reasoning, so that the model does not reason."""
    return renderer.decode(prompt[-_TAIL:]).rstrip().endswith(closing)
