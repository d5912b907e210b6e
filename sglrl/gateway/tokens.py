"""vLLM's ``POST /tokenize`` and ``POST /detokenize``.

Source: https://docs.vllm.ai/en/latest/serving/openai_compatible_server.html#tokenizer-api
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import msgspec
import numpy as np

from ..client.client import Client
from ..driver.threads import in_thread
from ..errors import InvalidRequest
from ..inference.options import RenderOptions
from ..inference.prompts import load_tokenizer
from ..inference.tokens import check_ids
from .accepted_fields import TOKENIZE_FIELDS
from .dialect import Message, decode_body


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a request to ``/tokenize``. It has either ``prompt`` or ``messages``."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None

    def check(self) -> None:
        """Raise ``InvalidRequest`` if fields exclude each other."""
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("give either prompt or messages")
        if self.messages is not None and self.add_special_tokens:
            raise InvalidRequest(
                "add_special_tokens is for a prompt: the chat template writes the special tokens"
            )
        for name in ("tools", "add_generation_prompt", "continue_final_message"):
            if self.messages is None and getattr(self, name):
                raise InvalidRequest(f"{name} is for messages, and none are given")
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidRequest("give one of continue_final_message and add_generation_prompt")

    def template(self) -> dict[str, Any]:
        """Return the arguments of the chat template."""
        options = RenderOptions(
            tools=self.tools or None,
            chat_template_kwargs=self.chat_template_kwargs,
            continue_final_message=bool(self.continue_final_message),
        )
        arguments = options.template_arguments(self.messages)
        if self.add_generation_prompt is False:
            arguments["add_generation_prompt"] = False
        return arguments


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a request to ``/detokenize``."""

    tokens: list[int]
    model: str | None = None
    skip_special_tokens: bool | None = None


async def tokenize(client: Client, body: bytes) -> dict[str, Any]:
    """Return the tokens of a text or a conversation.

    Raises:
        InvalidRequest: a field is wrong, or the chat template rejects the messages.
    """
    request = decode_body(body, TokenizeRequest, TOKENIZE_FIELDS)
    request.check()
    requests = client.requests
    box = requests.box
    if request.prompt is None:
        _, (ids,) = await requests.encode_prompts(None, None, request.messages, request.template())
        tokens: list[int] = np.frombuffer(ids, "<i4").tolist()
    else:
        await load_tokenizer(box)
        plain = request.add_special_tokens is False
        work = box.encode_rendered if plain else box.encode_texts
        (tokens,) = await in_thread(work, [request.prompt])
    made: dict[str, Any] = {
        "count": len(tokens),
        "max_model_len": client.info.max_total_tokens,
        "tokens": tokens,
        "token_strs": None,
    }
    if request.return_token_strs:
        made["token_strs"] = box.tokenizer.convert_ids_to_tokens(tokens)
    return made


async def detokenize(client: Client, body: bytes) -> dict[str, Any]:
    """Return the text of tokens, by default with special tokens.

    Raises:
        InvalidRequest: a field or a token is wrong.
    """
    request = decode_body(body, DetokenizeRequest)
    requests = client.requests
    if request.tokens:
        check_ids(request.tokens, requests.vocab_size)
    await load_tokenizer(requests.box)
    skip = bool(request.skip_special_tokens)
    text = await in_thread(requests.decode, request.tokens, skip)
    # vLLM's answer has the field "prompt", and SGLang's answer has the field "text".
    return {"prompt": text, "text": text}


Convert = Callable[[Client, bytes], Awaitable[dict[str, Any]]]
CONVERTING: Final[Mapping[str, tuple[Convert, type[msgspec.Struct]]]] = {
    "/tokenize": (tokenize, TokenizeRequest),
    "/detokenize": (detokenize, DetokenizeRequest),
    "/v1/tokenize": (tokenize, TokenizeRequest),
    "/v1/detokenize": (detokenize, DetokenizeRequest),
}
"""For each path, the function that answers and the struct of the request's body."""
