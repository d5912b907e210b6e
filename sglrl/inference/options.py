"""The keyword arguments of ``Client``'s methods as types, so that an editor can complete them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .sampling import SamplingOptions, SamplingParams, UnseededOptions
from .tool_choice import ToolChoice


class SessionOptions(UnseededOptions, total=False):
    """The keyword arguments of ``rollout`` for the sessions of all items."""

    tools: Sequence[Any] | None
    template: Mapping[str, Any] | None
    chat_template_kwargs: Mapping[str, Any] | None
    continue_final_message: bool
    allow_rewrite: bool
    renderer: str | None
    tool_choice: ToolChoice
    lora: str | None
    reward_weights: Mapping[str, float] | None


class GenerateOptions(SamplingOptions, total=False):
    """The keyword arguments of ``Client.generate`` for every kind of prompt."""

    logprobs: bool
    top_logprobs: int
    session: str | None
    priority: int
    timeout: float | None
    worker: int | None
    lora: str | None
    sampling: SamplingParams | None


class MessageOptions(GenerateOptions, total=False):
    """The keyword arguments of ``Client.generate`` for messages."""

    tools: Sequence[Any] | None
    template: Mapping[str, Any] | None
    chat_template_kwargs: Mapping[str, Any] | None
    continue_final_message: bool
    renderer: str | None
    tool_choice: ToolChoice
