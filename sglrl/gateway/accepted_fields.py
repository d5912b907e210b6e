"""Fields of requests that are accepted although they have no effect, in a table for each dialect.

An unsupported field is accepted if its value asks for nothing, or cannot change the answer. A
request with any other unsupported field is rejected. The tables contain the fields of the schemas
of OpenAI's and Anthropic's libraries, and of SGLang's and vLLM's servers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Final, NamedTuple

ANY: Final[Sequence[Any]] = (object(),)
"""Stands for all values: every value of the field is accepted."""
_NOTHING: Final[Sequence[Any]] = (None, False, [], {}, "")
"""The values that are accepted in a field that is not in the table. They ask for nothing."""


class Fields(NamedTuple):
    """The unsupported fields of a dialect.

    The name of a field within a part of the request includes the path of the part, as in
    ``tools[].strict``.

    Attributes:
        harmless: for each field, the values besides null that are accepted, or ``ANY``. In fields
            that are not listed, null, false and empty values are accepted.
        instead: for some fields, what to use in their place.
    """

    harmless: Mapping[str, Sequence[Any]] = {}
    instead: Mapping[str, str] = {}

    def accepts(self, name: str, value: Any) -> bool:
        """Return whether a value of an unsupported field is accepted.

        Args:
            name: the name of the field, with the path of its part.
            value: the value of the field.
        """
        values = self.harmless.get(name, _NOTHING)
        if values is ANY or value is None:
            return True
        return any(type(value) is type(one) and value == one for one in values)

    def hint(self, path: str, name: str, known: Sequence[str]) -> str:
        """Return the end of an error message: what to send in place of a field, or "".

        Args:
            path: the path of the part with the field, as in the tables.
            name: the name of the unsupported field.
            known: the names of the supported fields of the part.
        """
        if other := self.instead.get(path + name):
            return f"; use {other}"
        near = get_close_matches(name, known, n=1, cutoff=0.75)
        return f"; did you mean {near[0]!r}?" if near else ""


def _any(*names: str) -> dict[str, Sequence[Any]]:
    return dict.fromkeys(names, ANY)


_OPENAI: Final = _any(
    *("cache_salt", "metadata", "prompt_cache_key", "prompt_cache_options"),
    *("prompt_cache_retention", "safety_identifier", "service_tier", "store", "user"),
)
"""Fields for accounting and caching, which do not change the answer."""
_SERVERS: Final[dict[str, Sequence[Any]]] = {
    # These values are defaults of SGLang's and vLLM's servers, or hints for their scheduling.
    **_any("custom_labels", "extra_key", "routed_dp_rank", "session_id"),
    **_any("spaces_between_special_tokens"),
    "best_of": (1,),
    "data_parallel_rank": (-1,),
    "disagg_prefill_dp_rank": (-1,),
    "length_penalty": (1, 1.0),
}
_GUIDED: Final = {
    "guided_choice": "structured_outputs",
    "guided_grammar": "ebnf",
    "guided_json": "response_format",
    "guided_regex": "regex",
}

CHAT_FIELDS: Final = Fields(
    {
        **_OPENAI,
        **_SERVERS,
        # The text that the client expects. A server may use it to sample faster.
        **_any("prediction"),
        "add_generation_prompt": (True,),
        "include_reasoning": (True,),
        "modalities": (["text"],),
        "separate_reasoning": (True,),
        "stream_reasoning": (True,),
    },
    {
        **_GUIDED,
        "function_call": "tool_choice",
        "functions": "tools",
        "moderation": "a model of your own",
    },
)
COMPLETION_FIELDS: Final = Fields(
    {**_OPENAI, **_SERVERS, "add_special_tokens": (True,)},
    {
        **_GUIDED,
        "json_schema": "response_format",
        "max_completion_tokens": "max_tokens",
        "messages": "POST /v1/chat/completions",
        "suffix": "a prompt with the model's tokens for the middle of a text",
    },
)
RESPONSE_FIELDS: Final = Fields(
    {
        **_OPENAI,
        **_any("access_programs", "background_options", "client_metadata", "extra_key"),
        # These fields limit or describe the work of tools that OpenAI runs.
        **_any("image", "max_tool_calls"),
        **_any("tools[].strict", "tools[].defer_loading", "tools[].output_schema"),
        "tools[].allowed_callers": ([], ["direct"]),
        "truncation": ("disabled",),
        # The answer always has the whole reasoning as text. Clients need not send it back.
        **_any("reasoning.context", "reasoning.generate_summary", "reasoning.summary"),
        "reasoning.mode": ("standard",),
    },
    {
        "conversation": "previous_response_id",
        "max_completion_tokens": "max_output_tokens",
        "max_tokens": "max_output_tokens",
        "messages": "input",
        "response_format": "text.format",
    },
)
ANTHROPIC_FIELDS: Final = Fields(
    {
        # Fields for accounting and caching do not change the answer.
        **_any("cache_control", "metadata", "service_tier", "inference_geo", "user_profile_id"),
        **_any("billing_policy", "diagnostics", "workspace_id", "betas", "fallback_credit_token"),
        # The models to use if this model refuses a request. The gateway never refuses one.
        **_any("fallbacks"),
        "context_management": (
            {},
            {"edits": []},
            {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        ),
        "speed": ("standard",),
        **_any("messages[].cache_control", "tool_choice.cache_control"),
        **_any("content[].cache_control"),
        "content[].caller": ({"type": "direct"},),
        **_any("tools[].cache_control", "tools[].eager_input_streaming", "tools[].strict"),
        "tools[].allowed_callers": ([], ["direct"]),
        # The budgets have no effect. Only the chat template decides how much the model thinks.
        **_any("thinking.budget_tokens", "output_config.task_budget"),
    },
    {"output_format": "output_config.format"},
)
SGLANG_FIELDS: Final = Fields(
    {
        **_any("background", "conversation_id", "custom_labels", "external_trace_header"),
        **_any("extra_key", "http_worker_ipc", "log_metrics", "modalities", "no_logs"),
        **_any("received_time", "return_bytes", "routed_dp_rank", "routing_key", "session_id"),
        **_any("sampling_params.spaces_between_special_tokens", "sampling_params.stream_interval"),
        "disagg_prefill_dp_rank": (-1,),
    },
    {
        "custom_logit_processor": "logit_processor in sampling_params, the name of a declared "
        "class",
        "input_embeds": "text or input_ids",
        "return_hidden_states": "Client.generate(return_hidden_states=True)",
        "return_flat_raw_top_logprobs": "top_logprobs_num",
        "return_sampling_mask": "Client.generate(return_sampling_mask=True)",
        "session_params": "a session of the gateway (POST /sessions)",
    },
)
VLLM_FIELDS: Final = Fields(
    {
        **_any("cache_salt", "parse_context", "reasoning_ended", "reasoning_parser_kwargs"),
        **_any("token_offsets"),
        "output_mode": ("tokens",),
        **{
            f"sampling_params.{name}": ANY
            for name in (
                *("detokenize", "flat_logprobs", "output_kind", "skip_clone"),
                *("spaces_between_special_tokens", "stream_interval"),
            )
        },
        "sampling_params.best_of": (1,),
        "sampling_params.length_penalty": (1, 1.0),
        # ``prl_compact_logprobs`` asks for a shorter form of the logprobs. Servers need not support
        # it.
        "sampling_params.extra_args": (
            {"prl_compact_logprobs": True},
            {"prl_compact_logprobs": False},
        ),
    },
    {
        "content_parts": "token_ids",
        "features": "token_ids",
        "output_mode": "POST /v1/completions for text",
        "sampling_params.allowed_token_ids": "logit_bias or structured_outputs",
        "sampling_params.bad_words": "logit_bias",
        "sampling_params.logprob_token_ids": "logprobs",
        "sampling_params.prompt_logprob_token_ids": "prompt_logprobs",
    },
)
TOKENIZE_FIELDS: Final = Fields(instead={"text": "prompt"})


def without_effect(*names: str) -> Fields:
    """Return a table that accepts any value of these fields."""
    return Fields(_any(*names))
