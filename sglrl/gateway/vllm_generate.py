"""vLLM's ``POST /inference/v1/generate``: requests and answers, without I/O.

Prompts and outputs are token ids.

Source: ``GenerateRequest`` and ``SamplingParams`` of vLLM 0.33
(https://docs.vllm.ai/en/latest/api/vllm/entrypoints/scale_out/token_in_token_out/protocol).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from ..errors import InvalidRequest
from ..inference.completion import Completion
from .accepted_fields import VLLM_FIELDS
from .answers import weight_versions
from .chat import StreamOptions
from .dialect import (
    DONE,
    Dialect,
    Progress,
    Sent,
    TurnRequest,
    check_choices,
    convert_fields,
    decode_body,
    event,
    openai_error,
)
from .errors import HttpError
from .prompt_logprobs import Scored, by_token, check_whole, wanted_of
from .routed_experts import experts_for_verifiers
from .sampling_body import SamplingBody, sampling_fields
from .structured_outputs import grammar_names, with_structured_outputs
from .token_answers import TokenRow, token_rows, usage_of_prompts

MIN_LOGPROB: Final = -9999.0
"""Stands for minus infinity, which JSON does not have. vLLM sends the same number."""


@sampling_fields("vllm")
class _Sampling(SamplingBody, frozen=True, kw_only=True):
    """The field ``sampling_params``, with vLLM's names."""

    n: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    routed_experts_prompt_start: int | None = None
    structured_outputs: dict[str, Any] | None = None

    def given(self) -> dict[str, Any]:
        """Return the fields of ``SamplingParams`` that the request gives."""
        given = self.given_sampling()
        if given.get("seed") == -1:
            del given["seed"]
        return with_structured_outputs(given, self.structured_outputs)


class TokenRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a request of vLLM's ``POST /inference/v1/generate``."""

    token_ids: list[int]
    sampling_params: dict[str, Any] = {}
    model: str | None = None
    request_id: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = None
    return_token_ids: bool | None = None

    def turns(self) -> list[TurnRequest]:
        sampling = self._sampling()
        logprobs = sampling.logprobs or 0
        if logprobs < 0:
            raise InvalidRequest(
                f"logprobs={logprobs} is not supported: give the number of the likeliest tokens"
            )
        if sampling.prompt_logprobs is not None:
            check_whole("prompt_logprobs", self.stream)
        start = sampling.routed_experts_prompt_start or 0
        if not 0 <= start < max(1, len(self.token_ids)):
            raise InvalidRequest(
                f"routed_experts_prompt_start must be a position of the prompt, got {start}"
            )
        made = TurnRequest(
            prompt=self.token_ids,
            choices=check_choices(sampling.n),
            stream=bool(self.stream),
            sampling=sampling.given(),
            top_logprobs=logprobs,
            prompt_logprobs=wanted_of(sampling.prompt_logprobs),
            # In vLLM, requests with the lowest number are sampled first.
            priority=-(self.priority or 0),
            rid=self.request_id or "",
            experts_from=start,
            names={
                **sampling.sampling_names(),
                "top_logprobs": "logprobs",
                "input_ids": "token_ids",
                **grammar_names(None, sampling.structured_outputs),
            },
        )
        return [made]

    def answer(self, model: str, call_ids: str) -> TokensAnswer:
        return TokensAnswer(
            id=self.request_id or "",
            created=int(time.time()),
            model=model,
            request=self,
            sampling=self._sampling(),
        )

    def _sampling(self) -> _Sampling:
        return convert_fields(
            self.sampling_params,
            _Sampling,
            VLLM_FIELDS,
            where="sampling_params",
            part="sampling_params.",
        )


def parse(body: bytes) -> TokenRequest:
    """Parse the body of a request.

    Raises:
        InvalidRequest: the body is not JSON, a field has a wrong type, or a field asks for
            something that is not supported.
    """
    made = decode_body(body, TokenRequest, VLLM_FIELDS)
    if made.request_id:
        return made
    # A request needs an id, because the answer has it and clients may abort the request by it.
    return msgspec.structs.replace(made, request_id=secrets.token_hex(16))


# --- answers --------------------------------------------------------------------------------------


class TokensAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Makes the answer to a request of vLLM's token API. See ``TokenAnswer``.

    Attributes:
        id: the id of the request.
        created: the time of the answer, in seconds since 1970.
        model: the name of the model.
        request, sampling: the body of the request, and its ``sampling_params``.
        scored: a list with one item: the tokens of the prompt with their logprobs. Empty: the
            request does not want them.
    """

    id: str
    created: int
    model: str
    request: TokenRequest
    sampling: _Sampling
    scored: Sequence[Sequence[Scored]] = ()

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        body = {
            "request_id": self.id,
            "created": self.created,
            "model": self.model,
            "output_mode": "tokens",
            "choices": [self._choice(index, one, 0) for index, one in enumerate(completions)],
            "usage": usage_of_prompts(completions, len(completions)),
        }
        if self.scored:
            body["prompt_logprobs"] = by_token(self.scored[0], lambda token: None)
        if self.request.return_token_ids:
            body["prompt_token_ids"] = self.request.token_ids
        return body

    def begin(self) -> bytes:
        return b""

    def tokens(self, index: int, progress: Progress) -> bytes:
        return self._event(index, progress.completion, progress.sent)

    def end(self, completions: Sequence[Completion], sent: Sequence[Sent]) -> bytes:
        events = [self._event(index, one, sent[index]) for index, one in enumerate(completions)]
        options = self.request.stream_options
        if options is not None and options.include_usage:
            usage = usage_of_prompts(completions, len(completions))
            events.append(event({**self._head(), "choices": [], "usage": usage}))
        return b"".join(events) + DONE

    def failed(self, error: HttpError) -> bytes:
        return event(openai_error(error)) + DONE

    def _head(self) -> dict[str, Any]:
        return {"request_id": self.id, "output_mode": "tokens"}

    def _event(self, index: int, completion: Completion, sent: Sent) -> bytes:
        body = {**self._head(), "choices": [self._choice(index, completion, sent.tokens)]}
        if self.request.return_token_ids and not sent.tokens:
            body["prompt_token_ids"] = self.request.token_ids
        return event(body)

    def _choice(self, index: int, completion: Completion, start: int) -> dict[str, Any]:
        """Return the tokens of a choice from position ``start``."""
        finish = completion.finish_reason or None
        choice: dict[str, Any] = {
            "index": index,
            "token_ids": completion.output_ids[start:].tolist(),
            "logprobs": None,
            "finish_reason": finish,
            "stop_reason": self._stop_reason(completion) if finish else None,
        }
        if self.sampling.logprobs is not None:
            choice["logprobs"] = {"content": [_entry(row) for row in token_rows(completion, start)]}
        if finish:
            choice["weight_versions"] = weight_versions(completion)
            choice["routed_experts"] = experts_for_verifiers(completion)
        return choice

    def _stop_reason(self, completion: Completion) -> str | int | None:
        """Return the client's stop string or token, or None if the output ended in another way."""
        match = completion.stop_match
        given = self.sampling.given_sampling().get("stop_token_ids", ())
        return None if isinstance(match, int) and match not in given else match


def _entry(row: TokenRow) -> dict[str, Any]:
    """Return the logprobs at a position. The sampled token comes first."""
    ranks = {id_: rank for rank, (id_, _) in enumerate(row.others, 1)}
    others = [(row.id, row.logprob), *[one for one in row.others if one[0] != row.id]]
    tokens = [_one(id_, logprob, ranks.get(id_)) for id_, logprob in others]
    return {**tokens[0], "top_logprobs": tokens}


def _one(id_: int, logprob: float, rank: int | None) -> dict[str, Any]:
    # Clients of older vLLM versions read ``token``.
    return {
        "token": f"token_id:{id_}",
        "token_id": id_,
        "logprob": max(logprob, MIN_LOGPROB),
        "rank": rank,
        "bytes": None,
    }


VLLM_GENERATE: Final = Dialect(
    "/inference/v1/generate", parse, openai_error, TokenRequest, tokens=True
)
