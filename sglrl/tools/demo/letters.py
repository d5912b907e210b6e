"""The format of the demo's calls: a turn of one letter calls the tool.

It is short, so that a policy with random weights soon finds it.
"""

from __future__ import annotations

from typing import Any

from renderers.base import ParsedResponse, ParsedToolCall
from renderers.configs import DefaultRendererConfig
from renderers.default import DefaultRenderer


class LetterRenderer(DefaultRenderer):  # type: ignore[misc]
    """Renders with the model's chat template, and parses letters as calls of ``look_up``."""

    config_class = DefaultRendererConfig

    def __init__(self, tokenizer: Any, config: DefaultRendererConfig) -> None:
        super().__init__(tokenizer, config)
        self._decode = tokenizer.decode

    def parse_response(self, token_ids: list[int], **options: Any) -> ParsedResponse:
        """Return the message of a turn.

        Args:
            options: unused. A turn means the same after every prompt.
        """
        text = self._decode(token_ids, skip_special_tokens=True)
        if len(token_ids) != 1 or not text.isalpha():
            return ParsedResponse(content=text)
        call = ParsedToolCall(raw=text, name="look_up", arguments={"name": text})
        return ParsedResponse(content="", tool_calls=[call])
