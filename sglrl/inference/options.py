"""The options of calls, as types of keyword arguments and as checked structs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, TypedDict

import msgspec

from ..errors import InvalidRequest
from .sampling import SamplingOptions, SamplingParams
from .tool_choice import ToolChoice
from .tool_schemas import checked_tools


class MessageKeywords(TypedDict, total=False):
    """The keyword arguments that control how messages are rendered and parsed."""

    tools: Sequence[Any] | None
    template: Mapping[str, Any] | None
    chat_template_kwargs: Mapping[str, Any] | None
    continue_final_message: bool
    renderer: str | None
    tool_choice: ToolChoice


class RenderOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The values of ``MessageKeywords``, with which messages are rendered and parsed."""

    tools: Sequence[Any] | None = None
    template: Mapping[str, Any] | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    continue_final_message: bool = False
    renderer: str | None = None
    tool_choice: ToolChoice = "auto"

    def template_arguments(self, messages: Any) -> dict[str, Any]:
        """Return the arguments of the chat template. See ``Client.generate``.

        Args:
            messages: the messages to render, or None if there are none.

        Raises:
            InvalidRequest: an argument is wrong, or is given without messages.
        """
        if self.template and self.chat_template_kwargs:
            raise InvalidRequest("template and chat_template_kwargs are the same: give one of them")
        arguments = {**(self.template or self.chat_template_kwargs or {})}
        if self.tools is not None:
            arguments["tools"] = checked_tools(self.tools)
        if self.continue_final_message:
            arguments["continue_final_message"] = True
        if arguments and messages is None:
            raise InvalidRequest(f"{next(reversed(arguments))} is for messages, and none are given")
        return arguments


class CallKeywords(TypedDict, total=False):
    """The keyword arguments that all calls of an engine have. See ``Client.generate``."""

    priority: int
    timeout: float | None
    worker: int | None
    lora: str | None


class CallOptions(msgspec.Struct, frozen=True, gc=False):
    """The checked options of a call. ``Requests.options`` makes them.

    Attributes:
        logprobs: whether to return the logprobs of the tokens.
        top: the number of most likely tokens to return at each position.
        session: a name, or None. Calls with the same name go to the worker that holds their prefix.
        deadline: the time on the driver's clock at which the time limit ends. None: no limit.
        worker: the index of the only worker that may run the call. None: any worker.
        lora: the name of a LoRA adapter, or "".
    """

    logprobs: bool = False
    top: int = 0
    session: str | None = None
    deadline: float | None = None
    priority: int = 0
    worker: int | None = None
    lora: str = ""


class GenerateOptions(SamplingOptions, CallKeywords, total=False):
    """The keyword arguments of ``Client.generate`` for every kind of prompt."""

    logprobs: bool
    top_logprobs: int
    session: str | None
    sampling: SamplingParams | None


class MessageOptions(GenerateOptions, MessageKeywords, total=False):
    """The keyword arguments of ``Client.generate`` for messages, and of ``Client.stream``."""


CALL: Final = frozenset((*CallKeywords.__annotations__, "logprobs", "top_logprobs", "session"))
"""The names of the arguments of ``Requests.options``."""
MESSAGE: Final = frozenset(MessageKeywords.__annotations__)
