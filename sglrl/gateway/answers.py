"""Make the parts of answers that several dialects have in common."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from ..inference.completion import Completion
from .dialect import Message, Part

logger = logging.getLogger("sglrl.gateway")


def message_of(completion: Completion, ids: str = "") -> Message:
    """Return the message of a turn, as in OpenAI's chat completions.

    The stop string at the end is removed, unless the request sets ``no_stop_trim``. Tool calls that
    are not valid stay part of the content.

    Args:
        completion: the turn.
        ids: a prefix for the ids of tool calls.
    """
    message = completion.message.as_dict()
    content, stop = message["content"], completion.stop_match
    if isinstance(stop, str) and not completion.params.no_stop_trim and stop in content:
        content = content[: content.rfind(stop)]
    answer: Message = {"role": "assistant", "content": content, "refusal": None}
    if message.get("reasoning_content"):
        answer["reasoning_content"] = message["reasoning_content"]
    if calls := message.get("tool_calls"):
        answer["content"] = content or None
        answer["tool_calls"] = [
            {
                "id": ids + call["id"],
                "type": "function",
                "function": {
                    "name": call["function"]["name"],
                    "arguments": json_text(call["function"]["arguments"]),
                },
            }
            for call in calls
        ]
    return answer


def cuts_call(completion: Completion) -> bool:
    """Return whether a turn was cut off within a tool call."""
    cut = completion.finish_reason in ("length", "abort")
    return cut and any(call.error for call in completion.tool_calls)


def token_text(completion: Completion, token: int, as_ids: bool) -> str:
    """Return the text of a token. With ``as_ids``, return its id in vLLM's form, "token_id:5"."""
    return f"token_id:{token}" if as_ids else completion.decode([token], False)


def json_text(value: Any) -> str:
    """Return a value as JSON text. Lone surrogates, which UTF-8 cannot encode, are escaped."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value)
    return text


def unsent(message: Message, part: Part, sent: Mapping[Part, str]) -> str:
    """Return the rest of the text of a message's part, after the text that a stream has sent."""
    whole, before = message.get(part) or "", sent.get(part, "")
    if not whole.startswith(before):
        # Some parsers keep white space at the beginning of a part, but streams do not send it.
        whole = whole.lstrip()
    if not whole.startswith(before):
        logger.error("a stream sent %r of %r", before, whole)
        return ""
    return str(whole[len(before) :])


def token_counts(completions: Sequence[Completion]) -> tuple[int, int, int]:
    """Return the number of prompt tokens, of sampled tokens, and of cached prompt tokens.

    Args:
        completions: all choices of one prompt.
    """
    prompt = completions[0].prompt_tokens
    sampled = sum(len(one.output_ids) for one in completions)
    return prompt, sampled, min(completions[0].cached_tokens, prompt)


def weight_versions(completion: Completion) -> list[dict[str, int]]:
    """Return the policy versions of a completion's tokens, in the format of SGLang and vLLM."""
    return [
        {"version": span.version, "start": span.start, "end": span.stop}
        for span in completion.versions
    ]
