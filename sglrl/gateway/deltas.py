"""Split a turn into reasoning and content while it is sampled."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np

from ..inference.chunk import StreamText
from ..inference.renderer import Renderer
from ..inference.sampling import SamplingParams
from ..sessions.session_spec import SessionSpec
from ..wire.engine import TokenChunk
from .dialect import Part

_OPENING, _CLOSING = "<think>", "</think>"


class Deltas:
    """Splits the text of a turn, as it arrives, into the parts of the message.

    Text is passed on only if no later token can change it:

    * White space at the ends of a part is left out, because most parsers remove it.
    * After a special token, no text is passed on, because the token may begin a tool call. The
      special tokens around reasoning are an exception.
    * If the turn has tools in a format whose tool calls begin with ordinary text, such as Llama
      3's, no text is passed on before the end of the turn.

    Args:
        spec: the spec of the turn's session.
        params: the sampling parameters of the turn.

    Attributes:
        params: the sampling parameters of the turn.
        sent: the text of each part that was passed on so far.
    """

    def __init__(self, spec: SessionSpec, params: SamplingParams) -> None:
        self._decode = spec.requests.decode
        self.params = params
        self.sent: dict[Part, str] = {}
        self._special: Mapping[str, int] = {}
        self._ends: frozenset[int] = frozenset()
        self._part: Part | None = "content"
        renderer = spec.renderer
        if renderer is not None:
            self._special = renderer.added_tokens
            self._ends = frozenset(self._special.values())
            if renderer.tools and not marks_calls(renderer):
                self._part = None
            elif renderer.begins_reasoning(_OPENING, _CLOSING):
                self._part = "reasoning_content"
        self._strips = renderer is not None
        self._texts = StreamText(self._decode, params)
        self._space = ""

    def add(self, chunk: TokenChunk) -> list[tuple[Part, str]]:
        """Add new tokens. Return the text that they add to each part of the message."""
        new: list[tuple[Part, str]] = []
        ids = np.frombuffer(chunk.ids, "<i4")
        begin = 0
        for at, token in enumerate(ids.tolist()):
            if token in self._ends:
                new += self._text(chunk, begin, at, ends=True)
                begin = at + 1
                self._switch(token)
        if chunk.finish in ("", "abort"):
            # The turn goes on: a session continues an aborted turn, too. ``Answer.end`` sends the
            # last tokens of a turn.
            new += self._text(chunk, begin, len(ids))
        return new

    def _text(
        self, chunk: TokenChunk, begin: int, stop: int, ends: bool = False
    ) -> list[tuple[Part, str]]:
        part = self._part
        if part is None or (begin == stop and not ends):
            return []
        ids = chunk.ids[4 * begin : 4 * stop]
        # When a part ends, its last characters can no longer be the start of a stop string.
        finish = "length" if ends else ""
        tokens = msgspec.structs.replace(chunk, ids=ids, finish=finish, stop_match=None)
        text = self._texts.add(tokens)()
        if self._strips:
            text = self._space + text
            if part not in self.sent:
                text = text.lstrip()
            kept = text.rstrip()
            self._space = text[len(kept) :]
            text = kept
        if not text:
            return []
        self.sent[part] = self.sent.get(part, "") + text
        return [(part, text)]

    def _switch(self, token: int) -> None:
        """Set ``_part`` for the text after a special token. None: this text is not passed on."""
        before, self._part = self._part, None
        if token == self._special.get(_OPENING) and before == "content" and not self.sent:
            self._part = "reasoning_content"
        elif token == self._special.get(_CLOSING) and before == "reasoning_content":
            self._part = "content"
        self._texts = StreamText(self._decode, self.params)
        self._space = ""


def marks_calls(renderer: Renderer) -> bool:
    """Return whether each tool call begins with a special token in the renderer's format."""
    example = renderer.example(1) or ""
    written = example.partition(_CLOSING)[2] if _CLOSING in example else example
    return any(written.lstrip().startswith(token) for token in renderer.added_tokens)
