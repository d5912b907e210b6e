"""Encode the prompts of calls without a session, and parse their completions into messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..driver.threads import in_thread
from ..errors import InvalidRequest
from .completion import Completion
from .options import RenderOptions
from .prompts import as_messages, check_messages
from .renderer import Renderer, find_renderer, fitting_renderer
from .requests import Requests
from .sampling_cache import Prepared, SamplingCache
from .tokens import TokenizerBox
from .tool_choice import ToolChoice
from .turn_grammar import turn_grammar


class CompletionParser:
    """Parses the completions of some prompts into messages (``Completion.message``).

    Args:
        renderers: the renderer of each prompt, or None for a prompt without one.
        tool_choice: the tool choice of the call.
        asked: whether the options of the call require parsed messages. If False, completions are
            parsed only if ``prepare`` has added a grammar for whole turns.
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
        """Return ``prepared``, with a grammar for whole turns if needed. See ``turn_grammar``."""
        renderers = self._renderers
        made = await turn_grammar(samplings, prepared, self._tool_choice, renderers, prompts)
        if made is prepared and not self._asked:
            self._renderers = ()
        return made

    async def parse(self, completions: Sequence[Completion]) -> None:
        """Parse completions in a thread. All prompts must have the same number of completions."""
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


class EncodedPrompts(NamedTuple):
    """The prompts of one call of ``Client.generate`` or ``Client.stream``.

    Attributes:
        several: whether a list of prompts was given.
        prompts: the token ids of each prompt, int32 bytes.
        prepared: the sampling values, with a grammar for whole turns if needed.
        parser: the parser of the completions, or None if they are not parsed.
    """

    several: bool
    prompts: list[bytes]
    prepared: Prepared
    parser: CompletionParser | None


async def encode_call(
    requests: Requests,
    prompt: Any,
    input_ids: Any,
    messages: Any,
    options: RenderOptions,
    prepared: Prepared,
) -> EncodedPrompts:
    """Encode the prompts of a call.

    Args:
        prompt: one prompt or a list of prompts, each as text or messages.

    Raises:
        InvalidRequest: a prompt or an option is wrong.
    """
    prompt, messages = as_messages(prompt, messages)
    arguments = options.template_arguments(messages)
    several, prompts = await requests.encode_prompts(prompt, input_ids, messages, arguments)
    asked = options.tools or options.renderer is not None or options.tool_choice != "auto"
    if not asked and (messages is None or not prepared.params.grammars):
        return EncodedPrompts(several, prompts, prepared, None)
    if messages is None:
        given = "renderer" if options.tool_choice == "auto" else "tool_choice"
        raise InvalidRequest(f"{given} is for messages, and none are given")
    parser = await _completion_parser(requests.box, options, arguments, messages, prompts)
    prepared = await parser.prepare(requests.samplings, prepared, prompts)
    return EncodedPrompts(several, prompts, prepared, parser)


async def _completion_parser(
    box: TokenizerBox,
    options: RenderOptions,
    template: Mapping[str, Any],
    messages: Any,
    prompts: Sequence[bytes],
) -> CompletionParser:
    """Return the parser of completions.

    Args:
        messages: one conversation or a list of conversations.
        prompts: the encoded conversations, int32 bytes.

    Raises:
        InvalidRequest: see ``fitting_renderer``.
    """
    _, conversations = check_messages(messages)
    name = options.renderer

    def find() -> list[Renderer | None]:
        if template.get("continue_final_message"):
            # Renderers cannot write a prompt with an unfinished message, so skip the comparison.
            return [find_renderer(name, box, template)] * len(prompts)
        return [
            fitting_renderer(name, box, template, conversation, np.frombuffer(ids, "<i4").tolist())
            for conversation, ids in zip(conversations, prompts, strict=True)
        ]

    renderers = await in_thread(find)
    asked = bool(template.get("tools")) or name is not None or options.tool_choice != "auto"
    return CompletionParser(renderers, options.tool_choice, asked)
