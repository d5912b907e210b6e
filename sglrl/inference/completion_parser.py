"""Parse the completions of single calls, and prepare the grammar of their turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..driver.threads import in_thread
from ..errors import InvalidRequest
from .completion import Completion
from .prompts import check_messages
from .renderer import Renderer, find_renderer, fitting_renderer
from .sampling_cache import Prepared, SamplingCache
from .tokens import TokenizerBox
from .tool_choice import ToolChoice
from .turn_grammar import turn_grammar


class CompletionParser:
    """Parses the completions of some prompts (``Completion.message``).

    Args:
        renderers: of each prompt.
        asked: the caller wants messages. Otherwise they are parsed only if a grammar begins after
            the reasoning.
    """

    def __init__(
        self, renderers: Sequence[Renderer | None], tool_choice: ToolChoice, asked: bool
    ) -> None:
        self._renderers = renderers
        self._tool_choice = tool_choice
        self._asked = asked

    async def prepare(
        self, samplings: SamplingCache, prepared: Prepared, prompts: Sequence[bytes]
    ) -> Prepared:
        """Return the sampling values of the prompts with the grammar of whole turns."""
        found = self._renderers
        made = await turn_grammar(samplings, prepared, self._tool_choice, found, prompts)
        if made is prepared and not self._asked:
            self._renderers = ()
        return made

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
        if template.get("continue_final_message"):
            # Renderers cannot write such a prompt, so it is not compared.
            return [find_renderer(name, box, template)] * len(prompts)
        return [
            fitting_renderer(name, box, template, conversation, np.frombuffer(ids, "<i4").tolist())
            for conversation, ids in zip(conversations, prompts, strict=True)
        ]

    renderers = await in_thread(find)
    asked = bool(template.get("tools")) or name is not None or tool_choice != "auto"
    return CompletionParser(renderers, tool_choice, asked)
