"""The format of tool calls in the demo: a turn that is a single letter calls the tool.

The format is so short that a policy with random weights finds it soon.
"""

from __future__ import annotations

from typing import Any

from renderers.base import ParsedResponse, ParsedToolCall
from renderers.configs import DefaultRendererConfig
from renderers.default import DefaultRenderer


class LetterRenderer(DefaultRenderer):  # type: ignore[misc]
    """Renders with the model's chat template, and parses a letter as a call of ``look_up``."""

    config_class = DefaultRendererConfig

    def __init__(self, tokenizer: Any, config: DefaultRendererConfig) -> None:
        super().__init__(tokenizer, config)
        self._decode = tokenizer.decode

    def parse_response(self, token_ids: list[int], **options: Any) -> ParsedResponse:
        """Return the message of a turn.

        Args:
            token_ids: the sampled tokens of the turn.
            **options: not used, because the meaning of a turn does not depend on its prompt.
        """
        text = self._decode(token_ids, skip_special_tokens=True)
        if len(token_ids) != 1 or not text.isalpha():
            return ParsedResponse(content=text)
        call = ParsedToolCall(raw=text, name="look_up", arguments={"name": text})
        return ParsedResponse(content="", tool_calls=[call])
