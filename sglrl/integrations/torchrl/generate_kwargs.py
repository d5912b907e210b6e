"""Translate TorchRL's ``generate_kwargs`` and ``sampling_params`` to arguments of the client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ...errors import InvalidRequest
from ...inference.sampling import ALIASES, SamplingParams, from_kwargs

_CALL_ARGUMENTS: Final[tuple[str, ...]] = ("timeout", "priority", "worker", "lora")
"""The arguments of ``client.generate`` that ``generate_kwargs`` and the keyword arguments of a call
may contain."""
_NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    "do_sample": (True, False),
    "num_beams": (1,),
    "beam_width": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1, 0),
    "early_stopping": (False,),
    "best_of": (1,),
    "truncate_prompt_tokens": (-1,),
    "stream": (False,),
    "logprob_start_len": (-1,),
}
"""Arguments of TorchRL, vLLM and SGLang that sglrl does not have. Each has the values that are
ignored, because they do not change the result."""
_INSTEAD: Final = {
    "allowed_token_ids": "give logit_bias, or a regex or grammar",
    "bad_words": "give logit_bias with -inf for the tokens that begin them",
    "prompt_logprobs": "use client.score",
    "logprob_start_len": "use client.score",
    "truncate_prompt_tokens": "cut the prompt's token ids",
    "stream": "use client.stream",
    "guided_choice": "give a regex",
    "guided_decoding": "give json_schema, regex, ebnf or structural_tag",
    "structured_outputs": "give json_schema, regex, ebnf or structural_tag",
    "watermark": "newer versions of SGLang alone have it",
    "guided_options_request": "give json_schema, regex, ebnf or structural_tag",
}
"""The unsupported arguments, each with its replacement or the reason."""
_WITHOUT_EFFECT: Final = (
    # These arguments do not change the sampled tokens. Completions decode their text on access, and
    # SGLang's tokenizers ignore spaces_between_special_tokens. The others concern streaming, the
    # text of each token beside its logprob (which no result has), and progress bars.
    "detokenize",
    "spaces_between_special_tokens",
    "stream_interval",
    "return_text_in_logprobs",
    "use_tqdm",
)


def override(values: Mapping[str, Any], by: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``values`` overridden by ``by``. Aliases of a name count as the same name."""
    given = set(map(_canonical, by))
    return {k: v for k, v in values.items() if _canonical(k) not in given} | dict(by)


def _canonical(name: str) -> str:
    return "stop" if name == "stop_sequences" else ALIASES.get(name, name)


def understood(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values under the client's names, without None and neutral values.

    Raises:
        InvalidRequest: a value has no counterpart in the client, or names contradict each other.
    """
    arguments: dict[str, Any] = {}
    for name, value in values.items():
        if value is None or value in _NEUTRAL.get(name, ()):
            continue
        if name in _INSTEAD:
            raise InvalidRequest(f"{name}={value!r} cannot be asked for: {_INSTEAD[name]}")
        if name in _NEUTRAL:
            raise InvalidRequest(f"{name}={value!r}: SGLang has nothing of the kind")
        if name == "lora_request":
            arguments["lora"] = _adapter(value)
        elif name not in _WITHOUT_EFFECT:
            arguments[name] = value
    if {"lora", "lora_request"} <= values.keys() and arguments.get("lora") != values["lora"]:
        raise InvalidRequest("lora and lora_request name different adapters")
    if values.get("do_sample") is False:
        arguments["temperature"] = 0.0
    if arguments.get("top_k") == 0:
        # 0 means all tokens in SGLang and TorchRL.
        arguments["top_k"] = -1
    if "stop_sequences" in arguments:
        if "stop" in arguments:
            raise InvalidRequest("'stop_sequences' and another name for 'stop' were both given")
        arguments["stop"] = arguments.pop("stop_sequences")
    return arguments


def _adapter(request: Any) -> str:
    """Return the name of the LoRA adapter in vLLM's ``LoRARequest``. The path is not used.

    Raises:
        InvalidRequest: the request has no name.
    """
    name = request if isinstance(request, str) else getattr(request, "lora_name", None)
    if not isinstance(name, str):
        raise InvalidRequest(
            f"lora_request={request!r:.100} has no lora_name; load the adapter with "
            "client.load_lora(name, ...), and give this name"
        )
    return name


def split(values: dict[str, Any]) -> tuple[dict[str, Any], SamplingParams]:
    """Split standardized ``generate_kwargs`` into call arguments and sampling parameters.

    Raises:
        InvalidRequest: a value is not supported.
    """
    values = {k: v for k, v in values.items() if k != "num_return_sequences"}
    if (logprobs := values.pop("logprobs", None)) not in (None, True, False, 0, 1):
        raise InvalidRequest(f"logprobs={logprobs!r}: of sampled tokens alone")
    values = understood(values)
    call: dict[str, Any] = {name: values.pop(name) for name in _CALL_ARGUMENTS if name in values}
    params = from_kwargs(values)
    for name in ("return_sampling_mask", "return_routed_experts", "return_hidden_states"):
        if getattr(params, name):
            raise InvalidRequest(f"{name}: TorchRL's output has no place for it")
    if len(params.token_ids_logprob):
        raise InvalidRequest("token_ids_logprob: TorchRL's output has no place for it")
    return call, params
