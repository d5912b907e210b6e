"""Find out from an example how a model's template writes tool calls."""

from __future__ import annotations

import re
from typing import Any, Final, NamedTuple

_JSON: Final = r'\{"a": ?1, ?"b": ?2\}'
_TAGGED: Final = (
    r"(?P<before>\S\S*?)a(?P<between>.*?)1(?P<after>.*?)(?P=before)b(?P=between)2(?P=after)"
)
"""Patterns for the arguments of the example: ``_JSON`` for one JSON object, ``_TAGGED`` if each
argument is written between its own tags."""
_THOUGHT: Final = r".*?Hm\.\s*(?P<closing><[^<\s]*>)"
_CALL: Final = (
    r"(?P<space>\s*)(?P<begin>\S.*?)add(?P<middle>.*?)(?P<arguments>ARGUMENTS)(?P<end>.*?)"
)
_SECOND: Final = r"(?P<separator>.*?)(?P=begin)add(?P=middle)(?P=arguments)(?P=end)"


class CallStyle(NamedTuple):
    """The texts around the name and the arguments of a tool call.

    Attributes:
        closing: the token that ends the reasoning before the call, or "" without reasoning.
        space: the white space before the first call.
        begin, middle, end: the texts before the name, before the arguments, and after the
            arguments.
        separator: the text between two calls, or None if a turn has at most one call.
        before, between, after: the texts before an argument's name, before its value, and after its
            value. All are "" if the arguments are one JSON object.
        python: whether constants are written as in Python (``True``, ``None``) instead of JSON.
    """

    closing: str
    space: str
    begin: str
    middle: str
    end: str
    separator: str | None
    before: str = ""
    between: str = ""
    after: str = ""
    python: bool = False

    @property
    def tagged(self) -> bool:
        """Whether each argument is written between its own tags, and texts have no quotes."""
        return bool(self.before)

    @property
    def call(self) -> str:
        """All texts of a call except the name and the arguments, joined."""
        return "".join([self.begin, self.middle, self.before, self.between, self.after, self.end])


def call_style(once: str | None, twice: str | None, closings: set[str]) -> CallStyle | None:
    """Return the style in which examples are written, or None if it is not a known style.

    Args:
        once: the example with one call, see ``Renderer.example``.
        twice: the example with two calls.
        closings: the tokens that may end reasoning.
    """
    for text, form in ((twice, _CALL + _SECOND), (once, _CALL)):
        if text is None:
            continue
        thought = _THOUGHT if "Hm." in text else ""
        for arguments in (_JSON, _TAGGED):
            match = re.fullmatch(thought + form.replace("ARGUMENTS", arguments), text, re.DOTALL)
            if match is None:
                continue
            part: dict[str, Any] = {name: value or "" for name, value in match.groupdict().items()}
            if part.get("closing") and part["closing"] not in closings:
                continue
            part.pop("arguments")
            separator = part.pop("separator", None)
            return CallStyle(closing=part.pop("closing", ""), separator=separator, **part)
    return None


def argument_texts(style: CallStyle, raw: str) -> list[tuple[str, str]]:
    """Return the names and the unchanged texts of the arguments in the text of a call."""
    ends = map(re.escape, (style.before, style.between, style.after.rstrip()))
    before, between, after = ends
    return re.findall(f"{before}(.*?){between}(.*?){after}", raw, re.DOTALL)
