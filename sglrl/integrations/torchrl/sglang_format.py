"""Translate the arguments and results of SGLang's ``Engine.generate``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...errors import InvalidRequest
from ...inference.completion import Completion
from ...inference.sampling import SamplingParams
from .generate_kwargs import override, understood


def plain_prompts(given: Any) -> Any:
    """Convert vLLM's ``TextPrompt`` and ``TokensPrompt`` among the prompts to text or token ids.

    Raises:
        InvalidRequest: a prompt has parts other than text or token ids, or the list has both texts
            and token ids.
    """
    if isinstance(given, Mapping):
        return _plain(given)
    if isinstance(given, (list, tuple)) and any(isinstance(prompt, Mapping) for prompt in given):
        prompts = [_plain(prompt) if isinstance(prompt, Mapping) else prompt for prompt in given]
        if len({isinstance(prompt, str) for prompt in prompts}) > 1:
            raise InvalidRequest("prompts has texts and token ids; make two calls")
        return prompts
    return given


def _plain(prompt: Mapping[str, Any]) -> Any:
    """Return the token ids of a prompt or, if it has none, its text."""
    given = {name for name, value in prompt.items() if value is not None}
    if wrong := given - {"prompt", "prompt_token_ids"}:
        raise InvalidRequest(f"a prompt has text or token ids; it cannot have {sorted(wrong)}")
    if not given:
        raise InvalidRequest("a prompt needs 'prompt' or 'prompt_token_ids', got neither")
    # In vLLM, a text that is given with token ids is only for display.
    return prompt["prompt_token_ids" if "prompt_token_ids" in given else "prompt"]


def is_text(given: Any) -> bool:
    """Return whether the input is a text or a list of texts."""
    return isinstance(given, str) or (
        isinstance(given, (list, tuple)) and all(isinstance(prompt, str) for prompt in given)
    )


def is_one(given: Any) -> bool:
    """Return whether the input is one prompt: a text, or the token ids of one prompt."""
    if isinstance(given, str):
        return True
    ndim = getattr(given, "ndim", None)
    if ndim is not None:
        return bool(ndim == 1)
    return bool(given) and hasattr(given[0], "__index__") and not getattr(given[0], "ndim", 0)


def call_arguments(
    sampling_params: Mapping[str, Any] | SamplingParams | None, kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Merge the arguments into keyword arguments of ``client.generate``, including ``n``.

    The result may also contain SGLang's ``return_logprob`` and ``top_logprobs_num``.
    """
    values: dict[str, Any] = {}
    if isinstance(sampling_params, SamplingParams):
        values["sampling"] = sampling_params
    elif isinstance(sampling_params, Mapping):
        values.update(sampling_params)
    elif sampling_params is not None:
        raise TypeError(
            'sampling_params must be a mapping such as {"max_new_tokens": 16} or a '
            f"sglrl.SamplingParams, got {sampling_params!r}"
        )
    values = understood(override(values, kwargs))
    logprobs = values.pop("logprobs", False)
    if logprobs is not False:
        # In vLLM, a number requests the logprobs of this number of most likely tokens too.
        values["return_logprob"] = True
        if logprobs is not True:
            values.setdefault("top_logprobs_num", logprobs)
    return values


def result(completion: Completion, return_text: bool) -> dict[str, Any]:
    """Return a completion in the format of SGLang's ``/generate``."""
    reason: dict[str, Any] = {"type": completion.finish_reason}
    if completion.finish_reason == "length":
        reason["length"] = len(completion.output_ids)
    elif completion.stop_match is not None:
        reason["matched"] = completion.stop_match
    ids = completion.output_ids.tolist()
    meta: dict[str, Any] = {
        "finish_reason": reason,
        "prompt_tokens": len(completion.prompt_ids),
        "completion_tokens": len(ids),
        "cached_tokens": completion.cached_tokens,
        "e2e_latency": completion.timing.total,
        "weight_version": str(completion.versions[-1].version) if ids else "",
        "weight_versions": [tuple(span) for span in completion.versions],
        "actor_index": completion.worker,
    }
    if completion.logprobs is not None:
        meta["output_token_logprobs"] = [
            (logprob, token, None)
            for logprob, token in zip(completion.logprobs.tolist(), ids, strict=True)
        ]
    top = completion.top_logprobs
    if top is not None:
        meta["output_top_logprobs"] = [
            [(logprob, token, None) for logprob, token in zip(row, tokens, strict=True)]
            for row, tokens in zip(top.logprobs.tolist(), top.ids.tolist(), strict=True)
        ]
    given = completion.token_ids_logprobs
    if given is not None:
        tokens = completion.params.token_ids_logprob
        meta["output_token_ids_logprobs"] = [
            [(logprob, int(token), None) for logprob, token in zip(row, tokens, strict=True)]
            for row in given.tolist()
        ]
    states = completion.hidden_states
    if states is not None:
        meta["hidden_states"] = states.tolist()
    mask = completion.sampling_mask
    if mask is not None:
        meta["output_token_sampling_mask"] = [allowed.tolist() for allowed in mask.sets()]
    answer: dict[str, Any] = {"output_ids": ids, "meta_info": meta}
    if return_text:
        answer["text"] = completion.text
    return answer
