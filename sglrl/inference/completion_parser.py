"""Parse the completions of single calls, and make them call tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import InvalidRequest
from .completion import Completion
from .prompts import check_messages
from .renderer import Renderer, fitting_renderer
from .sampling import Prepared, SamplingCache
from .threads import in_thread
from .tokens import TokenizerBox
from .tool_choice import ToolChoice, require_call


class CompletionParser:
    """Parses the completions of some prompts (``Completion.message``).

    Args:
        renderers: of each prompt.
    """

    def __init__(self, renderers: Sequence[Renderer | None], tool_choice: ToolChoice) -> None:
        self._renderers = renderers
        self._tool_choice = tool_choice

    async def prepare(self, samplings: SamplingCache, prepared: Prepared) -> Prepared:
        """Add the grammar of ``tool_choice`` to the sampling values of the prompts."""
        return await require_call(samplings, prepared, self._tool_choice, self._renderers)

    async def parse(self, completions: Sequence[Completion]) -> None:
        """Parse the completions, equally many for each prompt, in a thread."""
        if not any(self._renderers):
            return
        await in_thread(self._parse, completions)

    def _parse(self, completions: Sequence[Completion]) -> None:
        each = len(completions) // len(self._renderers)
        for index, completion in enumerate(completions):
            renderer = self._renderers[index // each]
            if renderer is not None:
                ids = completion.prompt_ids.tolist(), completion.output_ids.tolist()
                completion.__dict__["message"] = renderer.parse(*ids, index)


async def completion_parser(
    name: str | None,
    tool_choice: ToolChoice,
    box: TokenizerBox,
    template: Mapping[str, Any],
    messages: Any,
    prompts: Sequence[bytes],
) -> CompletionParser:
    """Return the parser of completions.

    Args:
        name: of the renderer, as for ``find_renderer``.
        messages: one conversation, or a list, as for ``Client.generate``.
        prompts: the encoded conversations, int32 bytes.

    Raises:
        InvalidRequest: there are no messages, or as ``fitting_renderer``.
    """
    if messages is None:
        given = "renderer" if tool_choice == "auto" else "tool_choice"
        raise InvalidRequest(f"{given} is for messages, and none are given")
    _, conversations = check_messages(messages)

    def find() -> list[Renderer | None]:
        return [
            fitting_renderer(name, box, template, conversation, np.frombuffer(ids, "<i4").tolist())
            for conversation, ids in zip(conversations, prompts, strict=True)
        ]

    renderers = await in_thread(find)
    return CompletionParser(renderers, tool_choice)
