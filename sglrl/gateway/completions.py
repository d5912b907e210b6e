"""OpenAI's completions of text: requests and answers, without I/O.

https://platform.openai.com/docs/api-reference/completions
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..errors import InvalidRequest
from ..inference.chunk import StreamText
from ..inference.completion import Completion
from ..wire.engine import TokenChunk
from .accepted_fields import COMPLETION_FIELDS
from .answers import token_text, weight_versions
from .chat import ResponseFormat, StreamOptions, grammar_of
from .dialect import (
    DONE,
    Dialect,
    FlatBody,
    Progress,
    Sent,
    TurnRequest,
    check_choices,
    decode_body,
    event,
    openai_error,
)
from .errors import HttpError
from .prompt_logprobs import Scored, Wanted, by_token, check_whole, wanted_of
from .prompts import check_completions, prompts_of
from .routed_experts import check_experts, experts_of, given_experts
from .sampling_body import sampling_fields
from .structured_outputs import grammar_names, with_structured_outputs
from .token_answers import token_rows, usage_of_prompts

DEFAULT_MAX_TOKENS: Final = 16
_CONTEXT_TOKENS: Final = 16


@sampling_fields("completions")
class CompletionRequest(FlatBody, frozen=True, kw_only=True):
    """The body of a request of OpenAI's completions of text."""

    prompt: str | list[Any]
    model: str = ""
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    return_tokens_as_token_ids: bool | None = None
    n: int | None = None
    prompt_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_routed_experts: bool | None = None
    routed_experts_start_len: int | None = None
    lora_path: str | None = None

    def turns(self) -> list[TurnRequest]:
        _, prompts = prompts_of("prompt", self.prompt)
        choices = check_choices(self.n)
        check_completions(len(prompts), choices)
        if self.best_of not in (None, choices):
            raise InvalidRequest(f"best_of must equal n, got best_of={self.best_of}, n={choices}")
        scored = wanted_of(self.prompt_logprobs)
        if self.echo and self.logprobs is not None:
            top = max(self.logprobs, self.prompt_logprobs or 0)
            scored = Wanted(top=top, name="logprobs")
        if scored is not None:
            check_whole("prompt_logprobs, or echo with logprobs,", self.stream)
        if self.chat_template_kwargs:
            raise InvalidRequest("chat_template_kwargs is for messages: omit it")
        sampling = {
            "max_new_tokens": DEFAULT_MAX_TOKENS,
            **self.given_sampling(min_tokens=0),
            **grammar_of(self.response_format),
            **given_experts(self.return_routed_experts, self.routed_experts_start_len),
        }
        check_experts(self.return_routed_experts, len(prompts) * choices)
        if sampling["max_new_tokens"] == 0 and self.return_routed_experts:
            raise InvalidRequest("max_tokens=0 samples no token, so it has no routed experts")
        names = {
            **self.sampling_names(),
            "top_logprobs": "logprobs",
            "input_ids": "prompt",
            **grammar_names(self.response_format, self.structured_outputs),
        }
        return [
            TurnRequest(
                prompt=prompt,
                choices=choices,
                stream=bool(self.stream),
                sampling=with_structured_outputs(sampling, self.structured_outputs),
                top_logprobs=self.logprobs or 0,
                prompt_logprobs=scored,
                priority=self.priority or 0,
                lora=self.lora_path or "",
                names=names,
            )
            for prompt in prompts
        ]

    def answer(self, model: str, call_ids: str) -> CompletionAnswer:
        made = f"cmpl-{secrets.token_hex(12)}", int(time.time())
        return CompletionAnswer(*made, model, self)


def parse(body: bytes) -> CompletionRequest:
    """Parse the body of a request.

    Raises:
        InvalidRequest: the body is not JSON, a field has a wrong type, or a field asks for
            something that is not supported.
    """
    return decode_body(body, CompletionRequest, COMPLETION_FIELDS)


# --- answers --------------------------------------------------------------------------------------


class CompletionAnswer(msgspec.Struct, frozen=True):
    """Makes the answer to a request of OpenAI's completions of text. See ``TokenAnswer``.

    Attributes:
        id: the id of the answer.
        created: the time of the answer, in seconds since 1970.
        model: the name of the model.
        request: the body of the request.
        scored: for each prompt, its tokens with their logprobs. Empty: the request does not want
            them.
    """

    id: str
    created: int
    model: str
    request: CompletionRequest
    scored: Sequence[Sequence[Scored]] = ()

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """Return an object of type "text_completion"."""
        choices = [
            self._choice(index, one, one.text, Sent()) for index, one in enumerate(completions)
        ]
        return {
            **self._head(),
            "choices": choices,
            "usage": usage_of_prompts(completions, self._count),
            **self._experts(completions),
        }

    def begin(self) -> bytes:
        return b""

    def tokens(self, index: int, progress: Progress) -> bytes:
        text = progress.text()
        wanted = self.request.logprobs is not None or self.request.return_token_ids
        if len(text) == progress.sent.text and not wanted:
            return b""
        return self._event([self._choice(index, progress.completion, text, progress.sent)])

    def end(self, completions: Sequence[Completion], sent: Sequence[Sent]) -> bytes:
        events = [
            self._event([self._choice(index, one, one.text, sent[index])])
            for index, one in enumerate(completions)
        ]
        if experts := self._experts(completions):
            events.append(self._event([], experts))
        options = self.request.stream_options
        if options is not None and options.include_usage:
            usage = usage_of_prompts(completions, self._count)
            events.append(self._event([], {"usage": usage}))
        return b"".join(events) + DONE

    def failed(self, error: HttpError) -> bytes:
        return event(openai_error(error)) + DONE

    @property
    def _count(self) -> int:
        return check_choices(self.request.n)

    def _choice(self, index: int, completion: Completion, text: str, sent: Sent) -> dict[str, Any]:
        """Return the part of a choice that the stream has not sent yet."""
        request = self.request
        finish = completion.finish_reason or None
        echoed = self._prompt(index, completion) if request.echo and not sent.tokens else ""
        choice: dict[str, Any] = {
            "index": index,
            "text": echoed + text[sent.text :],
            "logprobs": None,
            "finish_reason": finish,
        }
        if request.logprobs is not None:
            as_ids = bool(request.return_tokens_as_token_ids)
            logprobs = _logprobs_of(completion, sent, request.logprobs, as_ids)
            if request.echo:
                logprobs = self._with_prompt(
                    logprobs, completion, self.scored[index // self._count]
                )
            choice["logprobs"] = logprobs
        if request.prompt_logprobs is not None:
            choice["prompt_logprobs"] = by_token(
                [
                    one._replace(others=one.others[: request.prompt_logprobs])
                    for one in self.scored[index // self._count]
                ],
                lambda token: completion.decode([token], False),
            )
        if finish:
            choice["matched_stop"] = completion.stop_match
            choice["weight_versions"] = weight_versions(completion)
        if request.return_token_ids:
            choice["token_ids"] = completion.output_ids[sent.tokens :].tolist()
            if finish:
                choice["prompt_token_ids"] = completion.prompt_ids.tolist()
        return choice

    def _with_prompt(
        self, own: dict[str, Any], completion: Completion, prompt: Sequence[Scored]
    ) -> dict[str, Any]:
        """Return the logprobs of a prompt, followed by the logprobs of the output.

        Args:
            own: the logprobs of the output.
            completion: the completion of the prompt.
            prompt: the tokens of the prompt with their logprobs.
        """
        as_ids = bool(self.request.return_tokens_as_token_ids)
        count = self.request.logprobs or 0
        *starts, end = _starts(completion, completion.prompt_ids)
        top = [
            None
            if one.logprob is None
            else {
                token_text(completion, id_, as_ids): logprob
                for id_, logprob in [*one.others[:count], (one.id, one.logprob)]
            }
            for one in prompt
        ]
        return {
            "tokens": [token_text(completion, one.id, as_ids) for one in prompt] + own["tokens"],
            "token_logprobs": [one.logprob for one in prompt] + own["token_logprobs"],
            "top_logprobs": top + own["top_logprobs"] if count else None,
            "text_offset": starts + [end + at for at in own["text_offset"]],
        }

    def _prompt(self, index: int, completion: Completion) -> str:
        """Return the text of the prompt of a choice."""
        _, prompts = prompts_of("prompt", self.request.prompt)
        prompt = prompts[index // self._count]
        if isinstance(prompt, str):
            return prompt
        return completion.decode(prompt, completion.params.skip_special_tokens)

    def _experts(self, completions: Sequence[Completion]) -> dict[str, Any]:
        if not self.request.return_routed_experts:
            return {}
        return {"sglext": experts_of(completions[0], self.request.routed_experts_start_len)}

    def _head(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
        }

    def _event(self, choices: list[Any], more: Mapping[str, Any] | None = None) -> bytes:
        return event({**self._head(), "choices": choices, **(more or {})})


def _logprobs_of(completion: Completion, sent: Sent, count: int, as_ids: bool) -> dict[str, Any]:
    """Return the logprobs of the tokens that were not sent yet, in OpenAI's older format.

    Args:
        completion: a completion with logprobs.
        sent: the part of the choice that was sent before.
        count: number of likeliest tokens for each position. The sampled token is always listed too.
        as_ids: return token ids in place of the texts of tokens, as ``token_text`` does.
    """

    def text_of(token: int) -> str:
        return token_text(completion, token, as_ids)

    rows = list(token_rows(completion, sent.tokens))
    top = [
        {text_of(token): logprob for token, logprob in [*row.others, (row.id, row.logprob)]}
        for row in rows
    ]
    return {
        "tokens": [text_of(row.id) for row in rows],
        "token_logprobs": [row.logprob for row in rows],
        "top_logprobs": top if count else None,
        "text_offset": _offsets(completion, sent),
    }


def _offsets(completion: Completion, sent: Sent) -> list[int]:
    """Return, for each token that was not sent yet, the number of characters before it."""
    # The text of a token depends on a few tokens before it.
    before = max(0, sent.tokens - _CONTEXT_TOKENS)
    starts = _starts(completion, completion.output_ids[before:])
    context = completion.output_ids[before : sent.tokens].tolist()
    skips = completion.params.skip_special_tokens
    known = len(completion.decode(context, skips).rstrip("\ufffd"))
    return [sent.text + max(0, at - known) for at in starts[sent.tokens - before : -1]]


def _starts(completion: Completion, ids: NDArray[np.int32]) -> list[int]:
    """Return the number of characters before each token, and then the number of all characters."""
    params = msgspec.structs.replace(completion.params, stop=())
    texts = StreamText(completion.decode, params)
    starts = [0]
    for token in ids:
        starts.append(starts[-1] + len(texts.add(TokenChunk(token.tobytes()))()))
    return starts


COMPLETIONS: Final = Dialect("/v1/completions", parse, openai_error, CompletionRequest, tokens=True)
