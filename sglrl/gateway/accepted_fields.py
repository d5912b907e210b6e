"""Fields that are accepted although they have no effect: one table for each dialect.

A field that asks for nothing that the gateway could do differently is accepted. All other fields
that are not supported are rejected. The tables have the fields of the schemas of OpenAI's and
Anthropic's libraries, and of SGLang's and vLLM's servers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Final, NamedTuple

ANY: Final[Sequence[Any]] = (object(),)
"""Every value of the field is harmless."""
_NOTHING: Final[Sequence[Any]] = (None, False, [], {}, "")
"""Values that ask for nothing, of all fields."""


class Fields(NamedTuple):
    """The fields of a dialect that are not supported.

    Names of fields within a part of the request have the path of the part: ``tools[].strict``.

    Attributes:
        harmless: by field, the values besides null that ask for nothing, or ``ANY``. Of all other
            fields: null, false and empty values.
        instead: by field, the one that takes its place.
    """

    harmless: Mapping[str, Sequence[Any]] = {}
    instead: Mapping[str, str] = {}

    def accepts(self, name: str, value: Any) -> bool:
        """Return whether a field that is not supported asks for nothing.

        Args:
            name: with the path of its part.
        """
        values = self.harmless.get(name, _NOTHING)
        if values is ANY or value is None:
            return True
        return any(type(value) is type(one) and value == one for one in values)

    def hint(self, path: str, name: str, known: Sequence[str]) -> str:
        """Return what to send in place of a field, as the end of an error; "" if there is nothing.

        Args:
            path: of the part with the field, as in the tables.
            known: the fields that are supported there.
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
"""Accounting and caching: they do not change the answer."""
_SERVERS: Final[dict[str, Sequence[Any]]] = {
    # The defaults of SGLang's and vLLM's servers, and hints for their scheduling.
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
        # Text that the client expects, to speed sampling up.
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
        # They limit or describe the work of tools that OpenAI runs.
        **_any("image", "max_tool_calls"),
        **_any("tools[].strict", "tools[].defer_loading", "tools[].output_schema"),
        "tools[].allowed_callers": ([], ["direct"]),
        "truncation": ("disabled",),
        # Whole reasoning is returned as text, and clients may return it or not.
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
        # Accounting and caching: they do not change the answer.
        **_any("cache_control", "metadata", "service_tier", "inference_geo", "user_profile_id"),
        **_any("billing_policy", "diagnostics", "workspace_id", "betas", "fallback_credit_token"),
        # Other models for requests that this one refuses, which it never does.
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
        # Only the template decides how much the model thinks.
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
        # A shorter form of the logprobs, which servers may leave out.
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
