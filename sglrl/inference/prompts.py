"""Check prompts and convert them to token ids, int32.

The caller gives one prompt or several, as token ids, texts or messages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from numbers import Real
from typing import Any

from ..config import type_of
from ..driver.threads import from_thread, in_thread
from ..errors import InvalidRequest
from .slow_stage import shown_if_slow
from .tokens import TokenizerBox, check_ids

Message = Mapping[str, Any]


def as_messages(prompt: Any, messages: Any) -> tuple[Any, Any]:
    """Return the prompt and the messages. If the prompt is messages, return it as the messages.

    The first argument of ``generate`` is the prompt, and many callers pass a conversation there.
    """
    if messages is None and isinstance(prompt, (list, tuple)) and prompt:
        first = prompt[0]
        if isinstance(first, Mapping) or (
            isinstance(first, (list, tuple)) and first and isinstance(first[0], Mapping)
        ):
            return None, prompt
    return prompt, messages


async def encode_prompts(
    box: TokenizerBox,
    vocab_size: int,
    prompt: Any,
    input_ids: Any,
    messages: Any,
    template: Mapping[str, Any] | None = None,
) -> tuple[bool, list[bytes]]:
    """Encode one prompt or a list of prompts.

    Args:
        template: the arguments of the chat template, see ``TokenizerBox.render``.

    Returns:
        Whether a list of prompts was given, and the token ids of each prompt.

    Raises:
        InvalidRequest: not exactly one of ``prompt``, ``input_ids`` and ``messages`` is given, or
            its value is wrong.
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
    inputs: Sequence[Any]
    work: Callable[[Sequence[Any]], list[list[int]]]
    if messages is not None:
        several, inputs = check_messages(messages)
        work = partial(box.encode_messages, template=template)
    else:
        several, inputs = (False, [prompt]) if isinstance(prompt, str) else (True, prompt)
        if not isinstance(inputs, (list, tuple)):
            raise InvalidRequest(
                f"prompt must be text or a list of texts, got {type_of(prompt)}; for tokens use "
                "input_ids"
            )
        if not inputs:
            raise InvalidRequest("the list of prompts is empty")
        for at, one in enumerate(inputs):
            if not isinstance(one, str):
                raise InvalidRequest(
                    f"prompt[{at}] must be text, got {type_of(one)}: {one!r:.99}; for tokens use "
                    "input_ids"
                )
        if not all(inputs):
            raise InvalidRequest("the prompt is empty; at least one token is needed")
        work = box.encode_texts
    await load_tokenizer(box)
    # Run the tokenizer in a thread, so that it does not block the event loop.
    encoded = await in_thread(work, inputs)
    return several, [check_ids(ids, vocab_size) for ids in encoded]


async def load_tokenizer(box: TokenizerBox) -> None:
    """Wait until the tokenizer is loaded, which takes seconds the first time.

    Raises:
        InvalidRequest: the model has no usable tokenizer.
    """
    if box.loaded:
        return
    slow = nullcontext() if box.awaited else shown_if_slow("loading the tokenizer", shown=box.shown)
    box.awaited = True
    async with slow:
        error = await from_thread(box.load_in_thread)
    if error is not None:
        raise error


def check_given_ids(input_ids: Any, vocab_size: int) -> tuple[bool, list[bytes]]:
    """Check token ids. Return whether a list of prompts was given, and the ids of each prompt."""
    if isinstance(input_ids, (list, tuple)):
        first: Any = input_ids[0] if input_ids else 0
        # Arrays and tensors have __index__ too, so also test ndim. Treat a float as a token id, so
        # that ``check_ids`` raises the error for it.
        one = hasattr(first, "__index__") or isinstance(first, Real)
        if getattr(first, "ndim", 0) or not one:
            return True, [check_ids(ids, vocab_size) for ids in input_ids]
    elif getattr(input_ids, "ndim", 1) == 2:
        return True, [check_ids(ids, vocab_size) for ids in input_ids]
    return False, [check_ids(input_ids, vocab_size)]


def check_messages(messages: Any) -> tuple[bool, list[Any]]:
    """Check one conversation or a list of conversations.

    Returns:
        Whether a list was given, and each conversation as returned by ``check_conversation``.

    Raises:
        InvalidRequest: ``messages`` is neither a conversation nor a list of conversations, or a
            message is wrong. The error states the wrong value.
    """
    if isinstance(messages, Sequence) and messages and not isinstance(messages, str):
        if not all(isinstance(one, (list, tuple)) for one in messages):
            return False, [check_conversation(messages)]
        if all(messages):
            checked = [check_conversation(one, f"messages[{i}]") for i, one in enumerate(messages)]
            return True, checked
    raise InvalidRequest(
        "messages must be a non-empty list of {'role': ..., 'content': ...}, or a list of such; "
        f"got {messages!r:.200}"
    )


def check_conversation(messages: Sequence[Any], name: str = "messages") -> list[Message]:
    """Return the messages of one conversation, with text as their content.

    A message is a mapping with a "role" and a "content". The content is text, or a list of OpenAI's
    content parts of type "text", which are joined (``_text_of``). In a message with "tool_calls"
    the content may be missing or None. Other content is rejected here, because templates render it
    as nothing or as its Python ``repr``, without an error. The given messages are not changed.

    Args:
        name: the caller's name for ``messages``, for errors.

    Raises:
        InvalidRequest: a message or a content part is wrong. The error states its position.
    """
    checked: list[Message] = []
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            wrong = f"is {type(message).__name__}, not a mapping"
        elif not isinstance(message.get("role"), str):
            wrong = "has no 'role' ('user', 'assistant', ...)"
        elif (content := message.get("content")) is None and not message.get("tool_calls"):
            wrong = "has no 'content'"
        elif isinstance(content, (list, tuple)):
            text = _text_of(content, f"{name}[{i}]['content']")
            checked.append({**message, "content": text})
            continue
        elif content is not None and not isinstance(content, str):
            wrong = (
                f"has a 'content' of type {type(content).__name__}; give text, or a list of "
                "{'type': 'text', 'text': ...}"
            )
        else:
            checked.append(message)
            continue
        raise InvalidRequest(f"{name}[{i}] {wrong}: {message!r:.200}")
    return checked


def _text_of(parts: Sequence[Any], name: str) -> str:
    """Return the texts of OpenAI's content parts, joined without a separator.

    Servers differ in the separator. For a template that takes only text, SGLang 0.5.17 joins with a
    space (``srt/parser/jinja_template_utils.py``) and vLLM with a newline
    (``entrypoints/chat_utils.py``). Templates that iterate over the parts (Llama 4, Qwen2.5-VL)
    write them one after another without a separator. mlx-lm and this function do the same, so the
    prompt contains the caller's characters and no others.

    Raises:
        InvalidRequest: a part is not text. The error states its type and position.
    """
    texts = []
    for i, part in enumerate(parts):
        if not isinstance(part, Mapping):
            wrong = f"is {type(part).__name__}, not a mapping with a 'type'"
        elif not isinstance(part.get("type"), str):
            wrong = "has no 'type'"
        elif part["type"] != "text":
            wrong = f"is of type {part['type']!r}, and only parts of type 'text' can be rendered"
        elif not isinstance(part.get("text"), str):
            wrong = f"is of type 'text', and its 'text' is {type(part.get('text')).__name__}"
        else:
            texts.append(part["text"])
            continue
        raise InvalidRequest(
            f"{name}[{i}] {wrong}; give text, or {{'type': 'text', 'text': ...}}: {part!r:.200}"
        )
    return "".join(texts)
