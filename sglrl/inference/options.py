"""The options of calls: as keyword arguments for editors, and checked, as one struct."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import msgspec

from .sampling import SamplingOptions, SamplingParams
from .tool_choice import ToolChoice


class MessageKeywords(TypedDict, total=False):
    """The keyword arguments that decide how messages are rendered and parsed."""

    tools: Sequence[Any] | None
    template: Mapping[str, Any] | None
    chat_template_kwargs: Mapping[str, Any] | None
    continue_final_message: bool
    renderer: str | None
    tool_choice: ToolChoice


class CallKeywords(TypedDict, total=False):
    """The keyword arguments of every call that takes tokens. See ``Client.generate``."""

    priority: int
    timeout: float | None
    worker: int | None
    lora: str | None


class CallOptions(msgspec.Struct, frozen=True, gc=False):
    """The options of a call, after their checks. ``Requests.options`` makes them.

    Attributes:
        logprobs: the logprobs of the tokens are wanted.
        top: the number of likeliest tokens that are wanted at each position.
        session: turns with the same name go to the worker that holds their prefix.
        deadline: on the driver's clock. None: no limit.
        worker: use only this worker.
        lora: the name of an adapter, or "".
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
    """The keyword arguments of ``Client.generate`` for messages."""
