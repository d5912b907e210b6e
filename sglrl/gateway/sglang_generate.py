"""SGLang's ``POST /generate``: requests and answers, without I/O.

Source: ``GenerateReqInput`` and ``SamplingParams`` of SGLang 0.5.17
(https://docs.sglang.io/basic_usage/native_api.html,
https://docs.sglang.io/basic_usage/sampling_params.html).
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, Final, TypeVar

import msgspec

from ..errors import InvalidRequest
from ..inference.completion import Completion
from ..inference.sampling import DEFAULT_MAX_NEW_TOKENS
from .accepted_fields import SGLANG_FIELDS
from .answers import weight_versions
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
)
from .errors import HttpError
from .prompt_logprobs import Scored, Wanted, check_whole
from .prompts import Prompt, check_completions, prompts_of
from .routed_experts import experts_of, given_experts
from .sampling_body import SamplingBody, sampling_fields
from .token_answers import token_rows

_T = TypeVar("_T")
_SAMPLING_PART: Final[dict[str, str]] = {"where": "sampling_params", "part": "sampling_params."}


@sampling_fields("sglang")
class _Sampling(SamplingBody, frozen=True, kw_only=True):
    """The field ``sampling_params``, with SGLang's names and our ``logit_processor``."""

    n: int | None = None


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a request of SGLang's ``POST /generate``."""

    text: str | list[Any] | None = None
    input_ids: list[Any] | None = None
    sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None
    rid: str | list[str] | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int | list[int] | None = None
    top_logprobs_num: int | list[int] | None = None
    token_ids_logprob: list[int | list[int] | None] | None = None
    return_routed_experts: bool | None = None
    routed_experts_start_len: int | None = None
    return_text_in_logprobs: bool | None = None
    return_prompt_token_ids: bool | None = None
    stream: bool | None = None
    priority: int | None = None
    lora_path: str | list[str | None] | None = None

    @property
    def model(self) -> None:
        return None

    def turns(self) -> list[TurnRequest]:
        _, prompts = self._prompts()
        count = len(prompts)
        params = self._sampling(count)
        choices = check_choices(params[0].n)
        check_completions(count, choices)
        if any(check_choices(one.n) != choices for one in params):
            raise InvalidRequest("n must be the same in all sampling_params of a batch")
        rids = self._rids(count)
        wants = _each("return_logprob", self.return_logprob, False, count)
        starts = _each("logprob_start_len", self.logprob_start_len, -1, count)
        top = _each("top_logprobs_num", self.top_logprobs_num, 0, count)
        given = self._given_ids(count)
        adapters = _each("lora_path", self.lora_path or None, None, count)
        experts = given_experts(self.return_routed_experts, self.routed_experts_start_len)
        turns = []
        for at, prompt in enumerate(prompts):
            scored = None
            if wants[at] and starts[at] != -1:
                check_whole("logprob_start_len", self.stream)
                if starts[at] < 0:
                    raise InvalidRequest(f"logprob_start_len must be at least -1, got {starts[at]}")
                scored = Wanted(starts[at], top[at], "top_logprobs_num")
            if top[at] and not wants[at]:
                raise InvalidRequest("top_logprobs_num needs return_logprob=true")
            if given[at] and not wants[at]:
                raise InvalidRequest("token_ids_logprob needs return_logprob=true")
            if given[at] and scored is not None:
                raise InvalidRequest("token_ids_logprob needs logprob_start_len=-1")
            sampling = _given(params[at], self.sampling_params, at) | experts
            if sampling.get("max_new_tokens") == 0 and (scored is None or experts):
                raise InvalidRequest(
                    "max_new_tokens=0 needs return_logprob=true and logprob_start_len, without "
                    "return_routed_experts"
                )
            if given[at]:
                sampling["token_ids_logprob"] = given[at]
            turns.append(
                TurnRequest(
                    prompt=prompt,
                    choices=choices,
                    stream=bool(self.stream),
                    sampling=sampling,
                    top_logprobs=top[at],
                    prompt_logprobs=scored,
                    priority=self.priority or 0,
                    rid=rids[at],
                    lora=adapters[at] or "",
                    names={
                        **params[at].sampling_names(),
                        "top_logprobs": "top_logprobs_num",
                        "lora": "lora_path",
                    },
                )
            )
        return turns

    def answer(self, model: str, call_ids: str) -> GenerateAnswer:
        several, prompts = self._prompts()
        count = len(prompts)
        choices = check_choices(self._sampling(count)[0].n)
        ids = [
            rid if choices == 1 else f"{rid}_{number}"
            for rid in self._rids(count)
            for number in range(choices)
        ]
        wants = _each("return_logprob", self.return_logprob, False, count)
        return GenerateAnswer(
            ids=ids,
            several=several or choices > 1,
            logprobs=[want for want in wants for _ in range(choices)],
            texts=bool(self.return_text_in_logprobs),
            prompts=bool(self.return_prompt_token_ids),
            given=[ids for ids in self._given_ids(count) for _ in range(choices)],
            experts_from=(self.routed_experts_start_len or 0)
            if self.return_routed_experts
            else None,
        )

    def _given_ids(self, count: int) -> list[list[int]]:
        """Return for each prompt the tokens whose logprobs are wanted at each position."""
        given = self.token_ids_logprob or []
        ids = [one for one in given if isinstance(one, int)]
        if len(ids) == len(given):
            return [ids] * count
        if ids:
            raise InvalidRequest("token_ids_logprob has token ids beside lists of token ids")
        lists = [one if isinstance(one, list) else [] for one in given]
        return _each("token_ids_logprob", lists, [], count)

    def _prompts(self) -> tuple[bool, list[Prompt]]:
        if (self.text is None) == (self.input_ids is None):
            raise InvalidRequest("give either text or input_ids")
        name = "text" if self.input_ids is None else "input_ids"
        several, prompts = prompts_of(name, self.text if self.input_ids is None else self.input_ids)
        if isinstance(prompts[0], str) != (name == "text"):
            other = "input_ids" if name == "text" else "text"
            raise InvalidRequest(f"{name} has the wrong type: use {other}")
        return several, prompts

    def _sampling(self, count: int) -> list[_Sampling]:
        given = self.sampling_params
        several = given if isinstance(given, list) else [given or {}] * count
        if len(several) != count:
            raise InvalidRequest(
                f"there are {count} prompts and {len(several)} sampling_params: give one for each"
            )
        return [convert_fields(one, _Sampling, SGLANG_FIELDS, **_SAMPLING_PART) for one in several]

    def _rids(self, count: int) -> list[str]:
        """Return for each prompt the id by which clients may abort its completions."""
        rid = self.rid or ""
        if isinstance(rid, str):
            return [f"{rid}_{at}" for at in range(count)] if count > 1 else [rid]
        if len(rid) != count or len(set(rid)) != count:
            raise InvalidRequest(
                f"there are {count} prompts, so rid must be text or {count} different texts, got "
                f"{rid!r:.200}"
            )
        return rid


def _each(name: str, value: _T | list[_T] | None, default: _T, count: int) -> list[_T]:
    """Return a list with a value for each prompt. A value that is not a list is for all prompts."""
    if not isinstance(value, list):
        return [default if value is None else value] * count
    if len(value) != count:
        raise InvalidRequest(f"there are {count} prompts and {len(value)} values of {name}")
    return value


def _given(params: _Sampling, fields: Any, at: int) -> dict[str, Any]:
    """Return the given fields of ``SamplingParams``, with the default of ``max_new_tokens``."""
    values = params.given_sampling(min_tokens=0)
    given = fields[at] if isinstance(fields, list) else fields or {}
    if "max_new_tokens" not in given:
        values["max_new_tokens"] = DEFAULT_MAX_NEW_TOKENS
    return values


def parse(body: bytes) -> GenerateRequest:
    """Parse the body of a request.

    Raises:
        InvalidRequest: the body is not JSON, a field has a wrong type, or a field asks for
            something that is not supported.
    """
    made = decode_body(body, GenerateRequest, SGLANG_FIELDS)
    # A request needs an id, because the answer has it and clients may abort the request by it.
    return made if made.rid else msgspec.structs.replace(made, rid=secrets.token_hex(16))


# --- answers --------------------------------------------------------------------------------------


class GenerateAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Makes the answer to a request of SGLang's ``POST /generate``. See ``TokenAnswer``.

    Attributes:
        ids: the id of each completion.
        several: whether the answer is a list.
        logprobs: for each completion, whether the request wants its logprobs.
        texts: whether to add the texts of tokens to logprobs.
        prompts: whether to add the tokens of the prompt.
        given: for each completion, the tokens whose logprobs are wanted at each position.
        experts_from: the first position whose routed experts are wanted. None: no routed experts.
        decoded: the texts of tokens that were decoded so far, by token id.
        scored: for each prompt, its tokens with their logprobs. Empty: the request does not want
            them.
    """

    ids: list[str]
    several: bool
    logprobs: list[bool]
    texts: bool
    prompts: bool
    given: list[list[int]]
    experts_from: int | None
    decoded: dict[int, str] = {}
    scored: Sequence[Sequence[Scored]] = ()

    def whole(self, completions: Sequence[Completion]) -> Any:
        made = [self._made(index, one, one.text) for index, one in enumerate(completions)]
        return made if self.several else made[0]

    def begin(self) -> bytes:
        return b""

    def tokens(self, index: int, progress: Progress) -> bytes:
        return self._event(index, progress.completion, progress.text())

    def end(self, completions: Sequence[Completion], sent: Sequence[Sent]) -> bytes:
        events = [self._event(index, one, one.text) for index, one in enumerate(completions)]
        return b"".join(events) + DONE

    def failed(self, error: HttpError) -> bytes:
        return event(sglang_error(error)) + DONE

    def _event(self, index: int, completion: Completion, text: str) -> bytes:
        # Each event has the whole output so far, as in SGLang without
        # --incremental-streaming-output.
        more = {"index": index} if self.several else {}
        return event({**self._made(index, completion, text), **more})

    def _made(self, index: int, completion: Completion, text: str) -> dict[str, Any]:
        made = {
            "text": text,
            "output_ids": completion.output_ids.tolist(),
            "meta_info": self._meta_info(index, completion),
        }
        if self.prompts:
            made["prompt_token_ids"] = completion.prompt_ids.tolist()
        return made

    def _meta_info(self, index: int, completion: Completion) -> dict[str, Any]:
        last = completion.chunks[-1].version
        info: dict[str, Any] = {
            "id": self.ids[index],
            "finish_reason": _finish_of(completion),
            "prompt_tokens": completion.prompt_tokens,
            "completion_tokens": len(completion.output_ids),
            "cached_tokens": min(completion.cached_tokens, completion.prompt_tokens),
            "weight_version": str(completion.versions[-1].version if completion.versions else last),
            "weight_versions": weight_versions(completion),
        }
        if completion.finish_reason:
            info["e2e_latency"] = completion.timing.total
            if self.experts_from is not None and completion.routed_experts is not None:
                info |= experts_of(completion, self.experts_from)
        if self.logprobs[index]:
            info |= self._logprobs(index, completion)
        return info

    def _logprobs(self, index: int, completion: Completion) -> dict[str, Any]:
        """Return the logprobs of a completion, each with its token and the token's text or null."""

        def entry(logprob: float | None, id_: int) -> list[Any]:
            text = self.decoded.get(id_) if self.texts else None
            if text is None and self.texts:
                text = self.decoded[id_] = completion.decode([id_], False)
            return [logprob, id_, text]

        rows = list(token_rows(completion))
        prompt: Sequence[Scored] = ()
        if self.scored:
            prompt = self.scored[index * len(self.scored) // len(self.ids)]
        logprobs: dict[str, Any] = {
            # As in SGLang, the first item has no logprob, even if it is not the prompt's first
            # token.
            "input_token_logprobs": [
                entry(one.logprob if at else None, one.id) for at, one in enumerate(prompt)
            ],
            "output_token_logprobs": [entry(row.logprob, row.id) for row in rows],
            "output_token_logprobs_length": len(rows),
        }
        given = completion.token_ids_logprobs
        if given is not None and (ids := self.given[index]):
            logprobs["output_token_ids_logprobs"] = [
                [entry(logprob, id_) for logprob, id_ in zip(row, ids, strict=True)]
                for row in given.tolist()
            ]
        if completion.top_logprobs is not None:
            logprobs["input_top_logprobs"] = [
                [entry(logprob, id_) for id_, logprob in one.others] if at else None
                for at, one in enumerate(prompt)
            ]
            logprobs["output_top_logprobs"] = [
                [entry(logprob, id_) for id_, logprob in row.others] for row in rows
            ]
        return logprobs


def _finish_of(completion: Completion) -> dict[str, Any] | None:
    match completion.finish_reason:
        case "":
            return None
        case "length":
            return {"type": "length", "length": len(completion.output_ids)}
        case "abort":
            return {"type": "abort", "message": "Aborted"}
        case other:
            return {"type": other, "matched": completion.stop_match}


def sglang_error(error: HttpError) -> dict[str, Any]:
    """Return the body of an answer for an error, in SGLang's own API."""
    return {"error": {"message": str(error), "type": error.kind, "code": error.status}}


SGLANG_GENERATE: Final = Dialect("/generate", parse, sglang_error, GenerateRequest, tokens=True)
