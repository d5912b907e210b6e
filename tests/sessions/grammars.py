"""Which tokens a structural tag allows, and random turns that it allows."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import xgrammar

from sglrl.inference.renderer import Renderer


class Allowed:
    """The turns that a format of a structural tag allows, with special tokens as single tokens."""

    def __init__(self, renderer: Renderer, form: dict[str, Any]) -> None:
        self._renderer = renderer
        tokenizer = renderer._box.tokenizer
        self._size = len(tokenizer)
        self.ends = renderer.end_tokens
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, stop_token_ids=self.ends)
        tag = json.dumps({"type": "structural_tag", "format": form})
        self._grammar = xgrammar.GrammarCompiler(info).compile_structural_tag(tag)

    def __call__(self, text: str) -> bool:
        return self.tokens([*self._renderer.encode(text), self.ends[0]])

    def begins(self, text: str) -> bool:
        """Whether a turn may begin with a text."""
        matcher = xgrammar.GrammarMatcher(self._grammar)
        return all(matcher.accept_token(token) for token in self._renderer.encode(text))

    def tokens(self, ids: Sequence[int]) -> bool:
        matcher = xgrammar.GrammarMatcher(self._grammar)
        return all(matcher.accept_token(token) for token in ids) and matcher.is_terminated()

    def walk(self, chance: random.Random, begin: str, most: int) -> list[int] | None:
        """Return a random turn that begins with a text, without its end. None: it gets too long.

        Tokens that few turns have, such as those that close a text, are drawn more often.
        """
        matcher = xgrammar.GrammarMatcher(self._grammar)
        mask = xgrammar.allocate_token_bitmask(1, self._size)
        drawn: list[int] = []
        for token in self._renderer.encode(begin):
            assert matcher.accept_token(token)
            drawn.append(token)
        special = [*self._renderer.added_tokens.values(), *self._renderer.encode('"}],')]
        while len(drawn) < most:
            matcher.fill_next_token_bitmask(mask)
            bits = np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")
            allowed = np.flatnonzero(bits[: self._size]).tolist()
            assert allowed, self._renderer.decode(drawn)
            rare = [token for token in special if token in allowed]
            token = chance.choice(rare if rare and chance.random() < 0.5 else allowed)
            if token in self.ends:
                return drawn
            assert matcher.accept_token(token)
            drawn.append(token)
        return None
