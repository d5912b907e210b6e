"""How the model's template writes calls of tools, learned from an example."""

from __future__ import annotations

import re
from typing import Any, Final, NamedTuple

_JSON: Final = r'\{"a": ?1, ?"b": ?2\}'
_TAGGED: Final = (
    r"(?P<before>\S\S*?)a(?P<between>.*?)1(?P<after>.*?)(?P=before)b(?P=between)2(?P=after)"
)
"""The arguments of the example: one JSON object, or each one between tags of its own."""
_THOUGHT: Final = r".*?Hm\.\s*(?P<closing><[^<\s]*>)"
_CALL: Final = (
    r"(?P<space>\s*)(?P<begin>\S.*?)add(?P<middle>.*?)(?P<arguments>ARGUMENTS)(?P<end>.*?)"
)
_SECOND: Final = r"(?P<separator>.*?)(?P=begin)add(?P=middle)(?P=arguments)(?P=end)"


class CallStyle(NamedTuple):
    """The texts around the name and the arguments of a call.

    Attributes:
        closing: the token that ends the reasoning before the call; "": there is no reasoning.
        space: white space before the first call.
        begin, middle, end: texts before the name, before the arguments, and after them.
        separator: the text between two calls; None: a turn has one call.
        before, between, after: texts before an argument's name, before its value and after it. All
            are "" if the arguments are one JSON object.
        python: ``True`` and ``None`` are written as in Python instead of JSON.
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
        """Whether each argument has tags of its own, and text is written without quotes."""
        return bool(self.before)

    @property
    def call(self) -> str:
        """The texts of a call, without name and arguments."""
        return "".join([self.begin, self.middle, self.before, self.between, self.after, self.end])


def call_style(once: str | None, twice: str | None, closings: set[str]) -> CallStyle | None:
    """Return the style of the example, with one call and with two: see ``Renderer.example``.

    Args:
        closings: tokens that may end reasoning.

    Returns:
        None if the format is unknown.
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
    """Return names and texts of the arguments of a call, as the template writes them."""
    ends = map(re.escape, (style.before, style.between, style.after.rstrip()))
    before, between, after = ends
    return re.findall(f"{before}(.*?){between}(.*?){after}", raw, re.DOTALL)
