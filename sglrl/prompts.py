"""Prompts on their way in: one or several, as token ids, texts or messages. They leave as checked
ids, int32."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from numbers import Real
from typing import Any

from .errors import InvalidRequest
from .tokens import TokenizerBox, check_ids

Message = Mapping[str, Any]


async def encode_prompts(
    box: TokenizerBox,
    vocab_size: int,
    prompt: Any,
    input_ids: Any,
    messages: Any,
    template: Mapping[str, Any] | None = None,
) -> tuple[bool, list[bytes]]:
    """Whether several are given, and the ids of each. ``template``: see ``TokenizerBox.render``.

    Raises:
        InvalidRequest: not exactly one of the three is given, or it is wrong.
    """
    given = [
        name
        for name, value in (("prompt", prompt), ("input_ids", input_ids), ("messages", messages))
        if value is not None
    ]
    if len(given) != 1:
        what = " and ".join(given) or "nothing"
        raise InvalidRequest(f"give exactly one of prompt, input_ids, messages; got {what}")
    if input_ids is not None:
        return check_given_ids(input_ids, vocab_size)
    work: Callable[[Sequence[Any]], list[list[int]]]
    if messages is not None:
        several, inputs = check_messages(messages)
        work = partial(box.encode_messages, template=template)
    else:
        several, inputs = (False, [prompt]) if isinstance(prompt, str) else (True, prompt)
        if not isinstance(inputs, (list, tuple)) or not all(isinstance(p, str) for p in inputs):
            raise InvalidRequest(
                f"prompt must be text or a list of texts, got {type(prompt).__name__}; for "
                "tokens use input_ids"
            )
        if not inputs:
            raise InvalidRequest("the list of prompts is empty")
        work = box.encode_texts
    # The tokenizer is native code: off the event loop, which goes on meanwhile.
    encoded = await asyncio.get_running_loop().run_in_executor(None, work, inputs)
    return several, [check_ids(ids, vocab_size) for ids in encoded]


def check_given_ids(input_ids: Any, vocab_size: int) -> tuple[bool, list[bytes]]:
    """As ``encode_prompts``, of token ids."""
    if isinstance(input_ids, (list, tuple)):
        first: Any = input_ids[0] if input_ids else 0
        # Arrays and tensors have __index__, too; and a float is one of wrong ids.
        one = hasattr(first, "__index__") or isinstance(first, Real)
        if getattr(first, "ndim", 0) or not one:
            return True, [check_ids(ids, vocab_size) for ids in input_ids]
    elif getattr(input_ids, "ndim", 1) == 2:
        return True, [check_ids(ids, vocab_size) for ids in input_ids]
    return False, [check_ids(input_ids, vocab_size)]


def check_messages(messages: Any) -> tuple[bool, list[Any]]:
    """Whether several conversations are given, and each of them as a list.

    A message is a mapping with a "role" and what is said, "content"; an assistant's "tool_calls"
    need none. Templates take what lacks them without a word, and leave it out of the prompt.

    Raises:
        InvalidRequest: it is neither a conversation nor a list of some; says which message is
            wrong.
    """
    if isinstance(messages, Sequence) and messages and not isinstance(messages, str):
        if not all(isinstance(one, (list, tuple)) for one in messages):
            check_conversation(messages)
            return False, [list(messages)]
        if all(messages):
            for i, one in enumerate(messages):
                check_conversation(one, f"messages[{i}]")
            return True, [list(one) for one in messages]
    raise InvalidRequest(
        "messages must be a non-empty list of {'role': ..., 'content': ...}, or a list of such; "
        f"got {messages!r:.200}"
    )


def check_conversation(messages: Sequence[Any], name: str = "messages") -> None:
    """The messages of one conversation; ``name``: what its caller calls them."""
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            wrong = f"is {type(message).__name__}, not a mapping"
        elif not isinstance(message.get("role"), str):
            wrong = "has no 'role' ('user', 'assistant', ...)"
        elif message.get("content") is None and not message.get("tool_calls"):
            wrong = "has no 'content'"
        else:
            continue
        raise InvalidRequest(f"{name}[{i}] {wrong}: {message!r:.200}")
