"""The options of a session, as types of keyword arguments and as one checked struct."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, SupportsFloat

import msgspec
from msgspec.structs import force_setattr

from ..config import check_target, check_timeout
from ..errors import InvalidRequest
from ..inference.options import MessageKeywords, RenderOptions
from ..inference.sampling import SamplingOptions, SamplingParams, UnseededOptions, own_names
from ..inference.tool_choice import chosen_tool
from ..inference.tool_schemas import checked_tools
from .rewards import checked_weights


class _Keywords(MessageKeywords, total=False):
    allow_rewrite: bool
    reward_weights: Mapping[str, SupportsFloat] | None
    lora: str | None
    sampling: SamplingParams | None


class RolloutSessionKeywords(_Keywords, UnseededOptions, total=False):
    """The keyword arguments of ``rollout`` that apply to the sessions of all items."""


class SessionKeywords(_Keywords, SamplingOptions, total=False):
    """The keyword arguments of ``Client.session`` except for its prompt."""

    timeout: float | None
    priority: int
    metadata: Mapping[str, Any] | None


class SessionOptions(RenderOptions, frozen=True, kw_only=True):
    """The options of a session, which ``Client.session`` documents. The constructor checks them.

    Attributes:
        values: single sampling parameters. They override the parameters in ``sampling``.

    Raises:
        UsageError: a value is wrong. The subclass ``InvalidRequest`` is raised for a wrong value
            that concerns the turns.
    """

    allow_rewrite: bool = False
    timeout: float | None = None
    priority: int = 0
    metadata: Mapping[str, Any] = {}
    reward_weights: Mapping[str, float] = {}
    lora: str | None = None
    sampling: SamplingParams | None = None
    values: dict[str, Any] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.renderer is not None and self.allow_rewrite:
            raise InvalidRequest("renderer is for messages: with allow_rewrite, none is used")
        if self.tools is not None:
            force_setattr(self, "tools", checked_tools(self.tools))
        chosen_tool(self.tool_choice, self.tools)
        force_setattr(self, "timeout", check_timeout(self.timeout))
        force_setattr(self, "priority", check_target(self.priority, None, None)[0])
        force_setattr(self, "metadata", self.metadata or {})
        force_setattr(self, "reward_weights", checked_weights(self.reward_weights))

    @classmethod
    def of(cls, keywords: Mapping[str, Any]) -> SessionOptions:
        """Return the options in ``SessionKeywords``. Other names are sampling parameters.

        Raises:
            InvalidRequest: a sampling parameter is given twice, or ``logprobs`` is not True.
        """
        own = {name: keywords[name] for name in _OPTIONS & keywords.keys()}
        rest = {name: value for name, value in keywords.items() if name not in own}
        return cls(**own, values=turn_values(rest))

    def changed(self, **changes: Any) -> SessionOptions:
        """Return these options with other values."""
        # Before msgspec 0.21, msgspec.structs.replace does not call __post_init__.
        return SessionOptions(**{**msgspec.structs.asdict(self), **changes})


_OPTIONS = frozenset(SessionOptions.__struct_fields__) - {"values"}


def turn_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return sampling values under the names of ``SamplingParams``, without ``logprobs``.

    Raises:
        InvalidRequest: a parameter is given twice, or ``logprobs`` is not True.
    """
    named = own_names(values)
    logprobs = named.pop("logprobs", None)
    if logprobs is not None and logprobs is not True:
        raise InvalidRequest(
            f"logprobs={logprobs!r}: a session always records logprobs, because its trajectory has "
            "them; leave the argument out, or use client.generate. For the likeliest tokens use "
            "top_logprobs=k"
        )
    return named
