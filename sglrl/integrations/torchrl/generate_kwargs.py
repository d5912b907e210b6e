"""What TorchRL's ``generate_kwargs`` and ``sampling_params`` ask for, in the client's words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ...errors import InvalidRequest
from ...inference.sampling import ALIASES, SamplingParams, from_kwargs

_CALL_ARGUMENTS: Final[tuple[str, ...]] = ("timeout", "priority", "worker")
"""Of ``client.generate``: in ``generate_kwargs`` and as keyword arguments of a call."""
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
"""Names of TorchRL, vLLM and SGLang without a counterpart here: values that ask for nothing."""
_INSTEAD: Final = {
    "custom_params": "only custom logit processors read them, which SGLang takes as pickled code",
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
}
"""What to use in place of others."""
_WITHOUT_EFFECT: Final = (
    # A text is made when it is read, SGLang's tokenizers ignore the second, and how often the
    # engine reports changes no result.
    "detokenize",
    "spaces_between_special_tokens",
    "stream_interval",
    "return_text_in_logprobs",
)


def override(values: Mapping[str, Any], by: Mapping[str, Any]) -> dict[str, Any]:
    """``by`` over ``values``, whichever of its names something has in either."""
    given = set(map(_canonical, by))
    return {k: v for k, v in values.items() if _canonical(k) not in given} | dict(by)


def _canonical(name: str) -> str:
    return "stop" if name == "stop_sequences" else ALIASES.get(name, name)


def understood(values: dict[str, Any]) -> dict[str, Any]:
    """In the client's words, without what asks for nothing.

    Raises:
        InvalidRequest: something is asked for that there is nothing of the kind of.
    """
    found = {}
    for name, value in values.items():
        if value is None or value in _NEUTRAL.get(name, ()):
            continue
        if name in _INSTEAD:
            raise InvalidRequest(f"{name}={value!r} cannot be asked for: {_INSTEAD[name]}")
        if name in _NEUTRAL:
            raise InvalidRequest(f"{name}={value!r}: SGLang has nothing of the kind")
        if name not in _WITHOUT_EFFECT:
            found[name] = value
    if values.get("do_sample") is False:
        found["temperature"] = 0.0
    if found.get("top_k") == 0:
        # SGLang's and TorchRL's word for all of them.
        found["top_k"] = -1
    if "stop_sequences" in found:
        if "stop" in found:
            raise InvalidRequest("'stop_sequences' and another name for 'stop' were both given")
        found["stop"] = found.pop("stop_sequences")
    return found


def split(values: dict[str, Any]) -> tuple[dict[str, Any], SamplingParams]:
    """Standardized ``generate_kwargs`` as arguments of ``client.generate`` and sampling values."""
    values = {k: v for k, v in values.items() if k != "num_return_sequences"}
    if (logprobs := values.pop("logprobs", None)) not in (None, True, False, 0, 1):
        raise InvalidRequest(f"logprobs={logprobs!r}: of sampled tokens alone")
    values = understood(values)
    call: dict[str, Any] = {name: values.pop(name) for name in _CALL_ARGUMENTS if name in values}
    return call, from_kwargs(values)
