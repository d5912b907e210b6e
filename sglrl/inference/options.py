"""The keyword arguments of ``Client``'s methods as types, so that an editor can complete them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from .sampling import LogprobsMode, SamplingParams
from .tool_choice import ToolChoice


class _SamplingOptions(TypedDict, total=False):
    """The fields of ``SamplingParams`` and the names of vLLM and OpenAI for them, but the seed."""

    max_new_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    min_new_tokens: int
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    ignore_eos: bool
    json_schema: str | Mapping[str, Any] | None
    regex: str | None
    ebnf: str | None
    skip_special_tokens: bool
    stop_regex: str | Sequence[str]
    no_stop_trim: bool
    logit_bias: Mapping[int | str, float] | None
    structural_tag: str | Mapping[str, Any] | None
    logprobs_mode: LogprobsMode
    return_sampling_mask: bool
    token_ids_logprob: Sequence[int]
    return_hidden_states: bool
    return_routed_experts: bool
    logit_processor: str | None
    custom_params: Mapping[str, Any] | None
    max_tokens: int | None
    max_completion_tokens: int | None
    min_tokens: int
    guided_json: str | Mapping[str, Any] | None
    guided_regex: str | None
    guided_grammar: str | None
    include_stop_str_in_output: bool


class SamplingOptions(_SamplingOptions, total=False):
    """The fields of ``SamplingParams`` and the names of vLLM and OpenAI for them."""

    seed: int | None
    sampling_seed: int | None


class SessionOptions(_SamplingOptions, total=False):
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
