"""Parse and extend conversations with the package ``renderers``.

A renderer implements the format of a family of models (https://pypi.org/project/renderers). It
parses reasoning and tool calls from sampled tokens. It also writes the tokens between two turns
without changing the earlier tokens (``bridge``).

Prompts are always rendered with the model's chat template. A renderer is used only if it encodes
the same messages to the same tokens.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from itertools import takewhile, zip_longest
from typing import Any, Final
from weakref import WeakKeyDictionary

from ..config import install
from ..errors import InvalidRequest
from .call_arguments import is_finite, parameters_of, texts_only, tool_name, with_arguments
from .call_style import CallStyle, call_style
from .chat_templates import PROBES, TOOL, read_arguments, render_conversation, template_text
from .message import AssistantMessage, ToolCall
from .prompts import Message
from .tokens import TokenizerBox
from .tool_schemas import schemas

logger = logging.getLogger("sglrl.renderer")

TEMPLATE: Final = "template"
"""The renderer name with which a caller selects no renderer."""
_SIGNS: Final = ("tool_call", "reasoning", "think")
"""The words that indicate reasoning or calls in a template. A template without them gets a renderer
only by name."""
_ERRORS: Final = {
    "invalid_json": "its arguments are not JSON",
    "unclosed_block": "it has no end",
    "missing_name": "it names no tool",
    "malformed_structure": "it does not have the format of a call",
    "unknown_tool": "there is no such tool",
}


class Renderer:
    """A renderer of the package ``renderers``, with the tokenizer and the tools that it uses.

    Args:
        name: the name of the renderer in the package.
        renderer: the renderer object of the package.
        tools: the schemas of the tools, or None.
    """

    def __init__(
        self, name: str, renderer: Any, box: TokenizerBox, tools: list[Any] | None
    ) -> None:
        self.name = name
        self._style: list[CallStyle | None] = []
        """A list with the cached value of ``call_style``. It is empty before the first use.
        ``with_tools`` shares the list with the copy."""
        self._renderer = renderer
        self._box = box
        self.tools = tools

    def with_tools(self, tools: list[Any] | None) -> Renderer:
        """Return a copy of this renderer with other tools."""
        made = Renderer(self.name, self._renderer, self._box, tools)
        made._style = self._style
        return made

    def keeping_thoughts(self) -> Renderer:
        """Return a renderer whose ``bridge`` assumes that the template removes no reasoning.

        Use the result if the template does not change the earlier messages of a conversation. If
        the package cannot set ``thinking_retention`` for this renderer, return the renderer itself.
        """
        try:
            made = _keeping.get(self._renderer)
            if made is None:
                from renderers.base import create_renderer

                config = self._renderer.config.model_copy(update={"thinking_retention": "all"})
                made = _keeping[self._renderer] = create_renderer(self._box.tokenizer, config)
        except Exception as error:
            logger.info("the renderer %r has no thinking_retention: %s", self.name, error)
            return self
        return Renderer(self.name, made, self._box, self.tools)

    def difference(self, messages: Sequence[Message], expected: Sequence[int]) -> str:
        """Return how the renderer's tokens of a prompt differ from ``expected``, or ""."""
        try:
            rendered = self._renderer.render_ids(
                list(messages), tools=self.tools, add_generation_prompt=True
            )
        except Exception as error:
            return f"it rejects the messages: {error}"
        for at, (own, other) in enumerate(zip_longest(rendered, expected)):
            if own != other:
                return f"token {at} is {own}, and the chat template has {other}"
        return ""

    @property
    def added_tokens(self) -> dict[str, int]:
        """The tokens that were added to the vocabulary, such as ``<tool_call>``, by text."""
        tokens: dict[str, int] = self._box.tokenizer.get_added_vocab()
        return tokens

    @property
    def end_tokens(self) -> list[int]:
        """The tokens that end a turn."""
        tokens: list[int] = self._renderer.get_stop_token_ids()
        return tokens

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text that may contain special tokens."""
        (ids,) = self._box.encode_rendered([text])
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, with special tokens."""
        return self._box.decode(list(ids), False)

    def is_reasoning(self, prompt: list[int]) -> bool:
        """Return whether the renderer reads the tokens after a prompt as reasoning."""
        try:
            parsed = self._renderer.parse_response([], tools=self.tools, prompt_ids=prompt)
        except Exception as error:
            logger.info("the renderer %r cannot parse an empty turn: %s", self.name, error)
            return False
        return not getattr(parsed, "reasoning_complete", True)

    def begins_turn(self, prompt: Sequence[int]) -> bool:
        """Return whether a prompt ends where the assistant's turn begins, not within it."""
        try:
            ask = self._renderer.render_ids(PROBES[0])
            whole = self._renderer.render_ids(PROBES[0], add_generation_prompt=True)
        except Exception as error:
            logger.info("the renderer %r cannot write a prompt: %s", self.name, error)
            return False
        header = whole[len(ask) :] if whole[: len(ask)] == ask else []
        return list(prompt[len(prompt) - len(header) :]) == header

    def begins_reasoning(self, opening: str, closing: str) -> bool:
        """Return whether a prompt ends with the beginning of the assistant's reasoning.

        Args:
            opening, closing: the special tokens around reasoning.
        """
        tokens = self.added_tokens
        try:
            ids = self._renderer.render_ids(PROBES[0], add_generation_prompt=True)[::-1]
        except Exception as error:
            logger.info("the renderer %r cannot write a prompt: %s", self.name, error)
            return False
        opened = ids.index(tokens[opening]) if tokens.get(opening) in ids else len(ids)
        closed = ids.index(tokens[closing]) if tokens.get(closing) in ids else len(ids)
        return opened < closed

    def example(self, calls: int, arguments: Mapping[str, Any] | None = None) -> str | None:
        """Return the text of a turn with the reasoning "Hm." and then calls of the tool ``add``.

        The text ends before the token that ends the turn.

        Args:
            calls: the number of calls in the turn.
            arguments: the arguments of ``add``. None: ``a=1, b=2``.

        Returns:
            The text, without the reasoning if the model's format has none. None if the renderer
            cannot write such a turn.
        """
        ask, answer = PROBES[2][:1], PROBES[2][1]
        ends = set(self.end_tokens)
        function = {"name": "add", "arguments": arguments or {"a": 1, "b": 2}}
        call = {"type": "function", "function": function}
        several = [{**call, "id": f"call_{number}"} for number in range(calls)]
        try:
            begin = self._renderer.render_ids(ask, tools=[TOOL], add_generation_prompt=True)
            for thought in ({}, {"reasoning_content": None}):
                turn = {**answer, **thought, "tool_calls": several}
                ids = self._renderer.render_ids([*ask, turn], tools=[TOOL])
                if ids[: len(begin)] == begin:
                    said = takewhile(lambda token: token not in ends, ids[len(begin) :])
                    return self._box.decode(list(said), False)
        except Exception as error:
            logger.info("the renderer %r cannot write %d calls: %s", self.name, calls, error)
        return None

    @property
    def call_style(self) -> CallStyle | None:
        """How the template writes tool calls, or None if ``CallStyle`` cannot describe it."""
        if not self._style:
            once = self.example(1)
            style = call_style(once, self.example(2), {*self.added_tokens})
            if style is not None and style.tagged and once is not None:
                # ``CallStyle`` cannot describe formats that also write the types of values. With
                # such a format, the parsed arguments are not the texts "1" and "2".
                (call,) = self._calls(self.encode(once), [], [texts_only("add", ["a", "b"])]) or [
                    None
                ]
                if call is None or call.arguments != {"a": "1", "b": "2"}:
                    style = None
            if style is not None and style.tagged:
                constant = self.example(1, {"a": True}) or ""
                style = style._replace(python=f"{style.between}True" in constant)
            self._style.append(style)
        return self._style[0]

    def _calls(self, sampled: list[int], prompt: list[int], tools: Any) -> list[Any]:
        """Return the calls of a turn as the package ``renderers`` parses them."""
        try:
            parsed = self._renderer.parse_response(sampled, tools=tools, prompt_ids=prompt)
        except Exception as error:
            logger.info("the renderer %r cannot parse a turn: %r", self.name, error)
            return []
        return list(parsed.tool_calls)

    def _reread(self, calls: Sequence[Any], prompt: list[int], sampled: list[int]) -> list[Any]:
        """Return the calls of a turn with arguments that are read according to their schemas."""
        style = self.call_style
        if style is None or not style.tagged or not calls:
            return list(calls)
        names: dict[str, set[str]] = {}
        for call in calls:
            if isinstance(call.arguments, Mapping):
                names.setdefault(call.name or "", set()).update(call.arguments)
        tools = [texts_only(name, sorted(arguments)) for name, arguments in names.items()]
        texts = self._calls(sampled, prompt, tools)
        if len(texts) != len(calls):
            return list(calls)
        schemas_ = {tool_name(tool): parameters_of(tool) for tool in self.tools or ()}
        return [
            with_arguments(style, call, text, schemas_.get(call.name, True))
            for call, text in zip(calls, texts, strict=True)
        ]

    def parse(self, prompt: list[int], sampled: list[int], number: int) -> AssistantMessage:
        """Parse an assistant's turn into a message.

        Args:
            prompt: the tokens before the turn.
            sampled: the tokens of the turn.
            number: the index of the turn. Calls without an id get ids that contain this number.
        """
        try:
            parsed = self._renderer.parse_response(sampled, tools=self.tools, prompt_ids=prompt)
        except Exception as error:
            logger.warning("the renderer %r cannot parse a turn: %r", self.name, error)
            return AssistantMessage(content=self._box.decode(sampled, True))
        calls = [
            _call(call, call.id or f"call_{number}_{index}")
            for index, call in enumerate(self._reread(parsed.tool_calls, prompt, sampled))
        ]
        return AssistantMessage(
            content=parsed.content,
            reasoning_content=parsed.reasoning_content,
            tool_calls=tuple(calls),
            raw_content=self._raw_content(parsed, calls, sampled),
        )

    def _raw_content(self, parsed: Any, calls: Sequence[ToolCall], sampled: list[int]) -> str:
        """Return ``AssistantMessage.raw_content``.

        Args:
            parsed: the turn as parsed by the package.
            calls: the calls of the turn.
            sampled: the tokens of the turn.
        """
        spans = [call.token_span for call in parsed.tool_calls]
        if not any(call.error for call in calls) or None in spans:
            return ""
        ends = set(self.end_tokens)
        ids = list(takewhile(lambda token: token not in ends, sampled))
        before = self._box.decode(ids[: spans[0][0]], False)
        text = before.rstrip()
        sizes = range(len(parsed.content), -1, -1)
        # The text before the calls may begin with reasoning, and the content may continue after the
        # calls. So find the longest beginning of the content with which this text ends.
        size = next(size for size in sizes if text.endswith(parsed.content[:size]))
        parts = [parsed.content[:size], before[len(text) :]]
        at = spans[0][0]
        for (start, stop), call in zip(spans, calls, strict=True):
            if call.error:
                stop = start
            parts.append(self._box.decode(ids[at:start], False))
            at = max(at, stop)
        parts.append(self._box.decode(ids[at:], False))
        raw = "".join(parts)
        return raw if size else raw.lstrip()

    def bridge(
        self, prompt: list[int], sampled: list[int], new: Sequence[Message]
    ) -> list[int] | None:
        """Return the prompt of the next turn. It begins with ``prompt`` and ``sampled``.

        Args:
            prompt: the tokens before the assistant's turn.
            sampled: the tokens of the assistant's turn.
            new: the messages after the turn.

        Returns:
            The tokens. None: the format would change earlier tokens, for example remove reasoning,
            or the package rejects the messages.
        """
        try:
            bridged = self._renderer.bridge_to_next_turn(
                prompt, sampled, list(new), tools=self.tools
            )
        except Exception as error:
            logger.warning("the renderer %r cannot extend a conversation: %r", self.name, error)
            return None
        if bridged is None:
            return None
        ids: list[int] = bridged.token_ids
        before = [*prompt, *sampled]
        return ids if ids[: len(before)] == before else None


def _call(parsed: Any, id_: str) -> ToolCall:
    status, arguments = str(parsed.status), parsed.arguments
    error = "" if status == "ok" else _ERRORS.get(status, status)
    if not error and isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            error = _ERRORS["invalid_json"]
    if not error and not isinstance(arguments, Mapping):
        error = "its arguments are not a JSON object"
    if not error and not is_finite(arguments):
        # Python reads NaN, Infinity and 1e999, which JSON cannot write.
        error = _ERRORS["invalid_json"]
    return ToolCall(
        id=id_,
        name=parsed.name or "",
        arguments=None if error else dict(arguments),
        raw=parsed.raw,
        error=error,
    )


_keeping: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""The variants of renderers that keep reasoning, see ``Renderer.keeping_thoughts``."""
_known: WeakKeyDictionary[TokenizerBox, dict[str, Renderer | None]] = WeakKeyDictionary()
"""The results of ``find_renderer`` by tokenizer, and then by name and template arguments."""


def find_renderer(
    name: str | None, box: TokenizerBox, template: Mapping[str, Any]
) -> Renderer | None:
    """Return the renderer of a model, or None. The first call takes about 1 s.

    Args:
        name: a name in ``renderers.base.RENDERER_REGISTRY``, or a class of the user
            (``renderers.custom``) as "module:Class" or "file.py:Class". "template": no renderer.
            None: the renderer that makes the same tokens as the chat template. There is none if
            the template mentions neither calls nor reasoning.
        template: the arguments of the chat template.

    Raises:
        InvalidRequest: there is no renderer of this name, it does not fit the tokenizer, or the
            package is not installed.
    """
    options = read_arguments(template_text(box, template), template)
    options = {k: v for k, v in options.items() if k not in ("tools", "continue_final_message")}
    known = _known.setdefault(box, {})
    key = repr((name, options))
    if key not in known:
        known[key] = _search(name, box, options)
    renderer, tools = known[key], template.get("tools")
    return renderer and renderer.with_tools(None if tools is None else schemas(tools))


def fitting_renderer(
    name: str | None,
    box: TokenizerBox,
    template: Mapping[str, Any],
    messages: Sequence[Message],
    prompt: Sequence[int],
) -> Renderer | None:
    """Return the renderer of a model, or None if it encodes the messages to other tokens.

    Args:
        name, template: as for ``find_renderer``.
        prompt: the tokens of the messages as rendered by the chat template.

    Raises:
        InvalidRequest: see ``find_renderer``, or the renderer that ``name`` selects does not make
            the tokens of the prompt.
    """
    renderer = find_renderer(name, box, template)
    difference = "" if renderer is None else renderer.difference(messages, prompt)
    if renderer is None or not difference:
        return renderer
    if name is not None:
        raise InvalidRequest(f"renderer={name!r} does not fit: {difference}")
    logger.info("the renderer %r is not used: %s", renderer.name, difference)
    return None


def _search(name: str | None, box: TokenizerBox, template: Mapping[str, Any]) -> Renderer | None:
    if name == TEMPLATE:
        return None
    text = template_text(box, template)
    if name is None and not any(sign in text for sign in _SIGNS):
        return None
    try:
        from renderers.base import MODEL_RENDERER_MAP
    except ImportError:
        if name is None:
            return None
        raise InvalidRequest(f"renderer= needs a package: {install('renderers')}") from None
    names = list(dict.fromkeys(MODEL_RENDERER_MAP.values()))
    if name is not None:
        if name not in names and ":" not in name:
            known = ", ".join(sorted([*names, TEMPLATE]))
            raise InvalidRequest(
                f"there is no renderer {name!r}; known: {known}; and your own, as 'module:Class'"
            )
        return _made(name, box, template)
    model = str(getattr(box.tokenizer, "name_or_path", ""))
    own = MODEL_RENDERER_MAP.get(model)
    for candidate in sorted(names, key=lambda name: name != own):
        try:
            renderer = _made(candidate, box, template)
        except InvalidRequest:
            continue
        if all(_agrees(renderer, box, template, probe) for probe in PROBES):
            logger.info("%s has the renderer %r", model, candidate)
            return renderer
    return None


def _made(name: str, box: TokenizerBox, template: Mapping[str, Any]) -> Renderer:
    from renderers import base, configs

    options = {k: v for k, v in template.items() if k != "chat_template"}
    try:
        if ":" in name:
            config = configs.CustomRendererConfig(import_path=name)
        else:
            config = configs.config_from_name(name)
        config = base.merge_chat_template_kwargs(config, options)
        made = base.create_renderer(box.tokenizer, config)
    except Exception as error:
        # The package raises many types of exceptions, including AssertionError.
        raise InvalidRequest(f"the renderer {name!r} does not fit this model: {error}") from None
    return Renderer(name, made, box, None)


def _agrees(
    renderer: Renderer,
    box: TokenizerBox,
    template: Mapping[str, Any],
    messages: list[dict[str, Any]],
) -> bool:
    """Return whether a renderer and the template encode a conversation to the same tokens."""
    try:
        text = render_conversation(box, messages, {**template, "tools": [TOOL]})
        (expected,) = box.encode_rendered([text])
    except InvalidRequest:
        return False
    return not renderer.with_tools([TOOL]).difference(messages, expected)
