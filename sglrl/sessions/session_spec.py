"""The spec of a session: its prompt, and the sampling parameters of its turns."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any, SupportsFloat

import numpy as np

from ..config import check_target, check_timeout
from ..driver.threads import in_thread
from ..errors import InvalidRequest
from ..inference.chat_templates import render_conversation
from ..inference.prompts import (
    Message,
    as_messages,
    check_messages,
    load_tokenizer,
    template_arguments,
)
from ..inference.renderer import Renderer, find_renderer, fitting_renderer
from ..inference.requests import Requests
from ..inference.sampling import SamplingParams, own_names
from ..inference.sampling_cache import Prepared
from ..inference.single_call import stop_after_call
from ..inference.tokens import TokenIds, check_ids
from ..inference.tool_choice import ToolChoice, chosen_tool
from ..inference.tool_schemas import checked_tools, schemas
from ..inference.turn_grammar import turn_grammar
from .rewards import checked_weights


def turn_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return sampling values of a turn under our names, without ``logprobs``.

    Raises:
        InvalidRequest: a parameter is given twice, or logprobs are not wanted.
    """
    found = own_names(values)
    logprobs = found.pop("logprobs", None)
    if logprobs is not None and logprobs is not True:
        raise InvalidRequest(
            f"logprobs={logprobs!r}: a session always records logprobs, because its trajectory has "
            "them; leave the argument out, or use client.generate. For the likeliest tokens use "
            "top_logprobs=k"
        )
    return found


class SessionSpec:
    """The checked arguments of ``Client.session``.

    All samples of a group share one spec, so the prompt is encoded once.

    Args:
        prompt, messages, input_ids: at most one of them. Without a prompt, the session serves
            conversations that begin elsewhere, each with a ``sibling`` of this spec, or its first
            observation is its prompt.

    Attributes:
        promptless: there is no prompt.
    """

    def __init__(
        self,
        requests: Requests,
        prompt: str | None = None,
        *,
        messages: Sequence[Message] | None = None,
        input_ids: TokenIds | None = None,
        tools: Sequence[Any] | None = None,
        template: Mapping[str, Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        allow_rewrite: bool = False,
        renderer: str | None = None,
        tool_choice: ToolChoice = "auto",
        timeout: float | None = None,
        priority: int = 0,
        metadata: Mapping[str, Any] | None = None,
        reward_weights: Mapping[str, SupportsFloat] | None = None,
        lora: str | None = None,
        sampling: SamplingParams | None = None,
        **values: Any,
    ) -> None:
        prompt, messages = as_messages(prompt, messages)
        given = (prompt is not None) + (messages is not None) + (input_ids is not None)
        if given > 1:
            raise InvalidRequest(f"give exactly one of prompt, input_ids, messages; got {given}")
        promptless = given == 0
        if renderer is not None and ((messages is None and not promptless) or allow_rewrite):
            why = "with allow_rewrite, none is used" if allow_rewrite else "none are given"
            raise InvalidRequest(f"renderer is for messages: {why}")
        tools = None if tools is None else checked_tools(tools)
        chosen_tool(tool_choice, tools)
        self.promptless = promptless
        self.tool_choice = tool_choice
        limit = check_timeout(timeout)
        self.requests = requests
        self.lora = self.requests.lora(lora)
        self.allow_rewrite = bool(allow_rewrite)
        self.renderer: Renderer | None = None
        """Parses and extends the conversation. Known after ``ids``."""
        self._renderer = renderer
        self._searched = False
        self._later_tools: list[Any] = []
        """Schemas of tools that messages describe, and not the prompt's list of tools."""
        self.timeout = requests.timeout if limit is None else limit
        self.priority, *_ = check_target(priority, None, None)
        self.metadata = metadata or {}
        self.reward_weights = checked_weights(reward_weights)
        self.sampling = sampling
        self.values = turn_values(values)
        self.prepared = self.requests.samplings.prepare(sampling, self.values)
        self.messages: list[Message] | None = None
        """The messages before the assistant's first turn."""
        self.begun = ""
        """The beginning of the assistant's first turn: ``continue_final_message``."""
        self._given = None
        self._given_template = template_arguments(
            [] if promptless else messages,
            tools,
            template,
            chat_template_kwargs,
            continue_final_message,
        )
        self.template = dict(self._given_template)
        if messages is not None:
            several, (given, *_) = check_messages(messages)
            if several:
                raise InvalidRequest("a session has one prompt, got a list")
            # Copy the messages: they are read later, and the caller may change them before.
            self._given = self.messages = [dict(message) for message in given]
            if self.template.pop("continue_final_message", False):
                self.begun = str(self.messages[-1].get("content") or "")
                self.messages = self.messages[:-1]
        self.warned = False
        """Whether the log says that the prompt is too long."""
        self.routed_from = 0
        """The first position of the prompt whose routed experts are wanted."""
        self._prompt = prompt
        info = requests.info
        self.vocab_size = info.vocab_size
        self.max_tokens = min(info.max_total_tokens, info.max_prompt_tokens + 1)
        """The largest number of tokens of a prompt and its output together."""
        self._lock: asyncio.Lock | None = None
        self.known_ids: bytes | None = None
        """The prompt as int32 bytes, once it is encoded."""
        if input_ids is not None:
            self.known_ids = check_ids(input_ids, info.vocab_size)

    @classmethod
    def of(
        cls,
        requests: Requests,
        found: Mapping[str, Any],
        values: Mapping[str, Any],
        sampling: SamplingParams | None,
    ) -> SessionSpec:
        """Create the spec of one item of a data set.

        Args:
            found: arguments of the item. They override ``values``.
            values: arguments of the run.
            sampling: sampling parameters of the run.
        """
        return cls(requests, **{**values, "sampling": sampling, **own_names(found)})

    def sibling(
        self,
        *,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        priority: int | None = None,
        lora: str | None = None,
        **prompt: Any,
    ) -> SessionSpec:
        """Return the spec of another conversation with the same settings.

        Args:
            tools: those of this spec are not used.
            chat_template_kwargs: they override those of this spec.
            priority, lora: None: that of this spec.
            **prompt: ``prompt``, ``messages`` or ``input_ids``.
        """
        if "messages" in prompt:
            template = {**self._given_template, **(chat_template_kwargs or {})}
            for name in ("continue_final_message", "tools"):
                template.pop(name, None)
            prompt |= {"template": template, "tools": tools}
            prompt |= {"renderer": self._renderer, "allow_rewrite": self.allow_rewrite}
        return SessionSpec(
            self.requests,
            timeout=self.timeout,
            priority=self.priority if priority is None else priority,
            lora=lora or self.lora or None,
            sampling=self.sampling,
            **self.values,
            **prompt,
        )

    def with_priority(self, priority: int) -> SessionSpec:
        """Return this spec, or a copy with another priority."""
        if priority == self.priority:
            return self
        made = copy(self)
        made.priority, *_ = check_target(priority, None, None)
        return made

    def with_later_tools(self, tools: Sequence[Any]) -> SessionSpec:
        """Return this spec, or a copy that also parses calls of tools that messages describe."""
        if not tools or list(tools) == self._later_tools:
            return self
        made = copy(self)
        made._later_tools = list(tools)
        made.renderer = made._with_all_tools(self.renderer)
        return made

    def _with_all_tools(self, renderer: Renderer | None) -> Renderer | None:
        if renderer is None or not self._later_tools:
            return renderer
        return renderer.with_tools([*(self.template.get("tools") or ()), *self._later_tools])

    def with_ids(self, ids: TokenIds) -> SessionSpec:
        """Return a copy whose prompt is given tokens. Its messages decide how turns are parsed."""
        made = copy(self)
        made.known_ids = check_ids(ids, self.vocab_size)
        return made

    @property
    def too_long(self) -> str:
        """Say that the encoded prompt leaves no room for a response; "" if it does."""
        size = 0 if self.known_ids is None else len(self.known_ids) // 4
        if size < self.max_tokens:
            return ""
        info = self.requests.info
        return (
            f"its prompt has {size:,} tokens, and together with a response at most "
            f"{self.max_tokens:,} are possible (a context of {info.context_length:,} and a KV "
            f"cache of {info.kv_cache_tokens:,} tokens)"
        )

    async def load(self) -> None:
        """Encode the prompt, or load the tokenizer if there is none."""
        if not self.promptless:
            await self.ids()
            return
        # Token ids need none.
        with contextlib.suppress(InvalidRequest):
            await load_tokenizer(self.requests.box)

    async def ids(self, messages: Sequence[Message] | None = None) -> bytes:
        """Return the token ids of the prompt, int32 bytes. Encode them on the first call.

        Args:
            messages: another conversation in place of the prompt.

        Raises:
            InvalidRequest: there is no prompt, or the chat template rejects it.
        """
        if self.promptless and messages is None:
            raise InvalidRequest(
                "this session has no prompt: give the session or the item 'prompt', 'messages' or "
                "'input_ids', or call session.observe before the first turn"
            )
        if messages is not None:
            _, (ids,) = await self.requests.encode_prompts(None, None, messages, self.template)
            await self._find_renderer(messages, ids)
            return ids
        if self.known_ids is None:
            if self._lock is None:
                self._lock = asyncio.Lock()
            async with self._lock:
                if self.known_ids is None:
                    several, prompts = await self.requests.encode_prompts(
                        self._prompt, None, self._given, self._given_template
                    )
                    if several:
                        raise InvalidRequest("a session has one prompt, got a list")
                    await self._find_renderer(None if self.begun else self.messages, prompts[0])
                    (self.known_ids,) = prompts
        await self._find_renderer(None, self.known_ids)
        return self.known_ids

    async def encode_text(self, text: str) -> bytes:
        """Return the token ids of a text that is a prompt, int32 bytes."""
        _, (ids,) = await self.requests.encode_prompts(text, None, None)
        return ids

    async def _find_renderer(self, messages: Sequence[Message] | None, prompt: bytes) -> None:
        """Find the renderer the first time, and check that it makes these tokens of the messages.

        Args:
            messages: None: do not check.

        Raises:
            InvalidRequest: the user has named a renderer that does not.
        """
        if self._searched or self.allow_rewrite or (self.messages is None and messages is None):
            return
        box, ids = self.requests.box, np.frombuffer(prompt, "<i4").tolist()

        def find() -> Renderer | None:
            if (tools := self.template.get("tools")) is not None:
                # Otherwise the template makes the schema of a function for each turn.
                self.template["tools"] = schemas(tools)
            if messages is None:
                return find_renderer(self._renderer, box, self.template)
            return fitting_renderer(self._renderer, box, self.template, messages, ids)

        self.renderer = self._with_all_tools(await in_thread(find))
        self._searched = True

    def prepare(self, values: dict[str, Any]) -> Prepared:
        """Check the sampling values of one turn. They override those of the session."""
        return self.requests.samplings.prepare(
            self.sampling, {**self.values, **turn_values(values)}
        )

    async def with_grammar(
        self, prepared: Prepared, choice: ToolChoice | None, parallel: bool, prompt: bytes
    ) -> Prepared:
        """Return the values of a turn with the grammar of the whole turn. Call after ``ids``.

        Args:
            choice: of this turn. None: that of the session.
            parallel: the turn may make several calls.
            prompt: the tokens before the turn, int32 bytes.
        """
        choice = self.tool_choice if choice is None else choice
        samplings = self.requests.samplings
        prepared = await turn_grammar(samplings, prepared, choice, [self.renderer], [prompt])
        if parallel or choice not in ("auto", "required"):
            return prepared
        return await stop_after_call(samplings, prepared, self.renderer)

    def render(self, messages: Sequence[Message]) -> str:
        """Return the text of a conversation, up to the assistant's turn."""
        return render_conversation(self.requests.box, messages, self.template)
