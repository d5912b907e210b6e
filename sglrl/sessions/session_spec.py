"""The spec of a session: the prompt and the options, from which its turns are prepared."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any, Final, Unpack

import numpy as np

from ..driver.threads import in_thread
from ..errors import InvalidRequest
from ..inference.chat_templates import render_conversation
from ..inference.prompts import Message, as_messages, check_messages, load_tokenizer
from ..inference.renderer import Renderer, find_renderer, fitting_renderer
from ..inference.requests import Requests
from ..inference.sampling import own_names
from ..inference.sampling_cache import Prepared
from ..inference.tokens import TokenIds, check_ids
from ..inference.tool_choice import ToolChoice
from ..inference.tool_schemas import schemas
from ..inference.turn_grammar import stop_after_call, turn_grammar
from .options import SessionKeywords, SessionOptions, turn_values

_PROMPTS: Final = ("prompt", "messages", "input_ids")


class SessionSpec:
    """The prompt and the options of a session.

    All samples of a group share one spec, so the prompt is encoded once.

    Args:
        options: the options of ``Client.session``. None: their defaults.
        prompt, messages, input_ids: the prompt. At most one of them may be given. A session without
            a prompt begins with an observation, or serves conversations over HTTP. Each HTTP
            conversation has its own spec, made by ``sibling``.

    Attributes:
        promptless: whether the spec has no prompt.
        prepared: the checked sampling values of the turns.
        template: the arguments of the chat template.

    Raises:
        InvalidRequest: the prompt is wrong, or an option cannot be used with this prompt.
        UnknownAdapter: the adapter is not loaded.
    """

    def __init__(
        self,
        requests: Requests,
        options: SessionOptions | None = None,
        *,
        prompt: str | None = None,
        messages: Sequence[Message] | None = None,
        input_ids: TokenIds | None = None,
    ) -> None:
        prompt, messages = as_messages(prompt, messages)
        given = (prompt is not None) + (messages is not None) + (input_ids is not None)
        if given > 1:
            raise InvalidRequest(f"give exactly one of prompt, input_ids, messages; got {given}")
        self.requests = requests
        self.options = options = options or SessionOptions()
        self.promptless = given == 0
        if options.renderer is not None and messages is None and not self.promptless:
            raise InvalidRequest("renderer is for messages: none are given")
        requests.lora(options.lora)
        self.prepared = requests.samplings.prepare(options.sampling, options.values)
        self.messages: list[Message] | None = None
        """The messages before the assistant's first turn."""
        self.begun = ""
        """The beginning of the assistant's first turn, if ``continue_final_message`` is set."""
        template = options.template_arguments([] if self.promptless else messages)
        self.template = dict(template)
        if messages is not None:
            several, (conversation, *_) = check_messages(messages)
            if several:
                raise InvalidRequest("a session has one prompt, got a list")
            # Copy the messages, because the caller may change them before they are read.
            messages = self.messages = [dict(message) for message in conversation]
            if self.template.pop("continue_final_message", False):
                self.begun = str(self.messages[-1].get("content") or "")
                self.messages = self.messages[:-1]
        self._given = prompt, None, messages, template
        """The arguments of ``Requests.encode_prompts`` for the prompt."""
        self.renderer: Renderer | None = None
        """The renderer that parses and extends the conversation. ``ids`` sets it."""
        self._searched = False
        self._later_tools: list[Any] = []
        """The schemas of tools that messages describe. The prompt's list of tools lacks them."""
        self.warned = False
        """Whether a warning was logged because the prompt is too long."""
        self.routed_from = 0
        """The first position of the prompt whose routed experts are requested."""
        self._lock: asyncio.Lock | None = None
        self.known_ids: bytes | None = None
        """The prompt as int32 bytes, once it is encoded."""
        if input_ids is not None:
            self.known_ids = check_ids(input_ids, requests.vocab_size)

    @classmethod
    def of(
        cls, requests: Requests, defaults: Mapping[str, Any], own: Mapping[str, Any]
    ) -> SessionSpec:
        """Return the spec of one item of a data set.

        Args:
            defaults: the arguments of ``Client.session`` for all items.
            own: the arguments for this item. They override ``defaults``.

        Raises:
            UsageError: a value is wrong.
        """
        keywords = {**defaults, **own_names(own)}
        prompts = {name: keywords.pop(name) for name in _PROMPTS if name in keywords}
        return cls(requests, SessionOptions.of(keywords), **prompts)

    def sibling(
        self,
        *,
        prompt: str | None = None,
        messages: Sequence[Message] | None = None,
        input_ids: TokenIds | None = None,
        **changes: Unpack[SessionKeywords],
    ) -> SessionSpec:
        """Return the spec of another conversation with the same options.

        Args:
            **changes: the options that differ. Arguments of the chat template override those of
                this spec. The tools of this spec are not used.
        """
        own = self.options
        kept: dict[str, Any] = {
            "timeout": own.timeout,
            "priority": own.priority,
            "lora": own.lora,
            "sampling": own.sampling,
            "values": own.values,
        }
        if messages is not None:
            template = {**(own.template or own.chat_template_kwargs or {})}
            template |= changes.pop("chat_template_kwargs", None) or {}
            kept |= {"template": template, "renderer": own.renderer}
            kept["allow_rewrite"] = own.allow_rewrite
        options = SessionOptions(**{**kept, **changes})
        return SessionSpec(
            self.requests, options, prompt=prompt, messages=messages, input_ids=input_ids
        )

    def with_priority(self, priority: int) -> SessionSpec:
        """Return this spec, or a copy with another priority."""
        if priority == self.options.priority:
            return self
        made = copy(self)
        made.options = self.options.changed(priority=priority)
        return made

    def with_later_tools(self, tools: Sequence[Any]) -> SessionSpec:
        """Return a spec that also parses calls of these tools, which messages describe."""
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
        """Return a copy with these tokens as its prompt.

        The messages are kept, because the renderer is selected with them.
        """
        made = copy(self)
        made.known_ids = check_ids(ids, self.requests.vocab_size)
        return made

    @property
    def max_tokens(self) -> int:
        """The largest number of tokens of a prompt and its output together."""
        info = self.requests.info
        return min(info.max_total_tokens, info.max_prompt_tokens + 1)

    @property
    def too_long(self) -> str:
        """A text that states that the encoded prompt leaves no room for a response, or ""."""
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
        """Encode the prompt. Without a prompt, load the tokenizer."""
        if not self.promptless:
            await self.ids()
            return
        # A session of token ids works without a tokenizer.
        with contextlib.suppress(InvalidRequest):
            await load_tokenizer(self.requests.box)

    async def ids(self, messages: Sequence[Message] | None = None) -> bytes:
        """Return the token ids of the prompt, int32 bytes. The first call encodes the prompt.

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
                    several, prompts = await self.requests.encode_prompts(*self._given)
                    if several:
                        raise InvalidRequest("a session has one prompt, got a list")
                    await self._find_renderer(None if self.begun else self.messages, prompts[0])
                    (self.known_ids,) = prompts
        await self._find_renderer(None, self.known_ids)
        return self.known_ids

    async def encode_text(self, text: str) -> bytes:
        """Encode a text as a prompt. Return its token ids, int32 bytes."""
        _, (ids,) = await self.requests.encode_prompts(text, None, None)
        return ids

    async def _find_renderer(self, messages: Sequence[Message] | None, prompt: bytes) -> None:
        """Find the renderer in the first call. Check that it encodes the messages as ``prompt``.

        Args:
            messages: the messages of the prompt. None: skip the check.

        Raises:
            InvalidRequest: the renderer that the user has named encodes the messages differently.
        """
        name, unused = self.options.renderer, self.options.allow_rewrite
        if self._searched or unused or (self.messages is None and messages is None):
            return
        box, ids = self.requests.box, np.frombuffer(prompt, "<i4").tolist()

        def find() -> Renderer | None:
            if (tools := self.template.get("tools")) is not None:
                # Make the schemas of functions once. Otherwise each turn makes them again.
                self.template["tools"] = schemas(tools)
            if messages is None:
                return find_renderer(name, box, self.template)
            return fitting_renderer(name, box, self.template, messages, ids)

        self.renderer = self._with_all_tools(await in_thread(find))
        self._searched = True

    def prepare(self, values: dict[str, Any]) -> Prepared:
        """Check the sampling values of one turn, which override the values of the session."""
        own = self.options
        return self.requests.samplings.prepare(own.sampling, {**own.values, **turn_values(values)})

    async def with_grammar(
        self, prepared: Prepared, choice: ToolChoice | None, parallel: bool, prompt: bytes
    ) -> Prepared:
        """Return the sampling values of a turn, with the grammar that ``turn_grammar`` makes.

        ``ids`` must have been called before, because it finds the renderer.

        Args:
            choice: the tool choice of this turn. None: the tool choice of the session.
            parallel: whether the turn may make several tool calls.
            prompt: the tokens before the turn, int32 bytes.
        """
        choice = self.options.tool_choice if choice is None else choice
        samplings = self.requests.samplings
        prepared = await turn_grammar(samplings, prepared, choice, [self.renderer], [prompt])
        if parallel or choice not in ("auto", "required"):
            return prepared
        return await stop_after_call(samplings, prepared, self.renderer)

    def render(self, messages: Sequence[Message]) -> str:
        """Return the text of a conversation, up to the assistant's turn."""
        return render_conversation(self.requests.box, messages, self.template)
