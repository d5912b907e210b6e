"""Errors name fields as the client wrote them, in every dialect."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest
import pytest_asyncio
from inference.sampling_examples import (
    BODIES,
    NOT_FAKE,
    example,
    http_body,
    received_sampling,
    sent,
)

import sglrl
from sglrl.errors import InvalidRequest
from sglrl.gateway.app import DIALECTS
from sglrl.gateway.dialect import Dialect
from sglrl.gateway.errors import named
from sglrl.gateway.serve import Gateway, serve
from sglrl.gateway.sglang_generate import _Sampling as SglangSampling
from sglrl.gateway.vllm_generate import _Sampling as VllmSampling
from sglrl.inference import sampling_fields as kinds
from sglrl.inference.sampling import FIELDS, SamplingParams

pytestmark = pytest.mark.asyncio(loop_scope="module")

ASK = [{"role": "user", "content": "Hi"}]
BASES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": ASK},
    "/v1/chat/completions/tokens": {"messages": ASK, "tokens": [5, 6]},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": ASK},
    "/v1/completions": {"prompt": "Hi"},
    "/generate": {"text": "Hi"},
    "/inference/v1/generate": {"token_ids": [5, 6]},
}
INNER: dict[str, Any] = {"/generate": SglangSampling, "/inference/v1/generate": VllmSampling}
"""The fields of ``sampling_params``."""
SYNONYMS = (
    {"max_new_tokens", "max_tokens", "max_completion_tokens", "max_output_tokens"},
    {"min_new_tokens", "min_tokens"},
    {"seed", "sampling_seed"},
    {"no_stop_trim", "include_stop_str_in_output"},
    {"stop", "stop_sequences"},
    {"top_logprobs", "top_logprobs_num", "logprobs", "prompt_logprobs"},
    {"input_ids", "token_ids", "tokens", "prompt", "text"},
    {"json_schema", "response_format", "text.format", "output_config.format", "structural_tag",
     "structured_outputs", "structured_outputs.json", "guided_json"},
    {"regex", "guided_regex", "structured_outputs.regex"},
    {"ebnf", "guided_grammar", "structured_outputs.grammar"},
)  # fmt: skip
"""Names of the same field in different dialects."""
SAMPLING = {*SamplingParams.__struct_fields__} | set[str]().union(*SYNONYMS)
BAD = {"type": "string", "pattern": "a\0"}
"""A schema that no grammar can be made of."""
OUT_OF_RANGE: dict[str, list[Any]] = {
    "temperature": [-1.0],
    "top_p": [0.0, 2.0],
    "top_k": [-7],
    "min_p": [3.0],
    "frequency_penalty": [9.0],
    "presence_penalty": [9.0],
    "repetition_penalty": [9.0],
    "stop": ["", [""]],
    "stop_sequences": [[""]],
    "stop_regex": ["("],
    "stop_token_ids": [[-1], [1 << 25]],
    "logit_bias": [{"5": 1e9}, {str(1 << 25): 1.0}, {"x": 1.0}],
    "seed": [-5],
    "sampling_seed": [-5],
    "max_new_tokens": [-1],
    "max_tokens": [-1],
    "max_completion_tokens": [0],
    "max_output_tokens": [0],
    "min_new_tokens": [-1],
    "min_tokens": [-1],
    "regex": ["a\0"],
    "ebnf": ["a\0"],
    "response_format": [{"type": "json_schema", "json_schema": {"name": "x", "schema": BAD}}],
    "structured_outputs": [{"json": BAD}, {"regex": "a\0"}],
    "text": [{"format": {"type": "json_schema", "name": "x", "schema": BAD}}],
    "output_config": [{"format": {"type": "json_schema", "schema": BAD}}],
    "json_schema": [BAD],
    "logprobs": [100_000],
    "prompt_logprobs": [100_000],
    "n": [0],
}
WRONG_TYPE: dict[str, Any] = {
    "logit_bias": [1], "stop": [5], "stop_sequences": [5], "stop_token_ids": ["x"],
    "stop_regex": [5], "custom_params": 5, "structured_outputs": 5, "response_format": 5,
    "json_schema": 5, "structural_tag": 5, "regex": 5, "ebnf": 5, "logit_processor": 5,
    "text": 5, "output_config": 5,
}  # fmt: skip
"""A wrong value of each field whose type is not a number or a bool."""


def kind_of(dialect: Dialect) -> Any:
    return INNER.get(dialect.path, dialect.body)


def values_of(name: str) -> list[Any]:
    return [*OUT_OF_RANGE.get(name, []), WRONG_TYPE.get(name, "x")]


CASES = [
    (dialect, field.name, value)
    for dialect in DIALECTS
    for field in msgspec.structs.fields(kind_of(dialect))
    if field.name in SAMPLING | OUT_OF_RANGE.keys()
    and not (dialect.path == "/generate" and field.name == "text")
    for value in values_of(field.name)
    if field.name not in BASES[dialect.path]
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway() -> AsyncIterator[Gateway]:
    async with (
        sglrl.launch("tiny", engine="fake") as pool,
        serve(pool, name="tiny") as gateway,
    ):
        yield gateway


async def refused(gateway: Gateway, dialect: Dialect, fields: dict[str, Any]) -> str:
    """Send a request that is wrong. Return the message of its error."""
    inner = {"sampling_params": fields} if dialect.path in INNER else fields
    async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as http:
        answer = await http.post(dialect.path, json={**BASES[dialect.path], **inner})
    assert answer.status_code == 400, answer.text[:1000]
    return str(answer.json()["error"]["message"])


def check(message: str, name: str) -> None:
    """Check that a message names a field, and none of its other names."""
    words = set(re.findall(r"[\w.]+", re.sub(r"'[^']*'", "", message.partition(", got ")[0])))
    words = {word.strip(".") for word in words} | {word for one in words for word in one.split(".")}
    quoted = set(re.findall(r"[`']([\w.]+)", message))
    assert name in words | {one.partition(".")[0] for one in quoted}, message
    for several in SYNONYMS:
        if name in several:
            parts = {name, *(one for one in several if one.startswith(name + "."))}
            others = {one for one in several - parts if "_" in one or "." in one}
            assert not words & others, message


@pytest.mark.parametrize(
    ("dialect", "name", "value"),
    [pytest.param(*case, id=f"{case[0].path} {case[1]} {case[2]!r:.30}") for case in CASES],
)
async def test_the_name_is_the_clients(
    gateway: Gateway, dialect: Dialect, name: str, value: Any
) -> None:
    fields = {name: value}
    if name == "top_logprobs" and "logprobs" in kind_of(dialect).__struct_fields__:
        fields["logprobs"] = True
    check(await refused(gateway, dialect, fields), name)


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda one: one.path)
async def test_two_fields_that_do_not_fit(gateway: Gateway, dialect: Dialect) -> None:
    names = kind_of(dialect).__struct_fields__
    least = next(name for name in ("min_tokens", "min_new_tokens") if name in names)
    for most in (one for one in SYNONYMS[0] if one in names):
        message = await refused(gateway, dialect, {least: 20, most: 5})
        assert f"{least}=20 is more than {most}=5" in message


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda one: one.path)
async def test_stop_takes_texts(gateway: Gateway, dialect: Dialect) -> None:
    message = await refused(gateway, dialect, {"stop": [5]})
    assert re.search(r"\bstop\b.*stop_token_ids", message), message


@pytest.mark.parametrize("dialect", kinds.DIALECTS)
async def test_every_dialect_sends_every_sampling_field(gateway: Gateway, dialect: str) -> None:
    path, _ = BODIES[dialect]
    async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as http:
        for field in FIELDS.values():
            # The grammar of a chat is about the text after the reasoning.
            if field.name in NOT_FAKE or isinstance(field.kind, kinds.Grammar):
                continue
            for name in field.in_dialect(dialect):
                with received_sampling() as received:
                    answer = await http.post(path, json=http_body(dialect, name, example(field)))
                assert answer.status_code == 200, answer.text
                assert received[0].get(field.name) == sent(field), name


async def test_too_many_logprobs(gateway: Gateway) -> None:
    for path, fields, name in (
        ("/v1/completions", {"logprobs": 99_999}, "logprobs"),
        ("/v1/completions", {"prompt_logprobs": 99_999}, "prompt_logprobs"),
        ("/v1/completions", {"logprobs": 99_999, "echo": True}, "logprobs"),
        ("/v1/chat/completions", {"prompt_logprobs": 99_999}, "prompt_logprobs"),
        ("/generate", {"top_logprobs_num": 99_999, "return_logprob": True}, "top_logprobs_num"),
    ):
        body = {**BASES[path], **fields}
        async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as http:
            answer = await http.post(path, json=body)
        assert answer.status_code == 400
        check(answer.json()["error"]["message"], name)


async def test_a_stream_names_them_too(gateway: Gateway) -> None:
    body = {"messages": ASK, "min_tokens": 20, "max_tokens": 5, "stream": True}
    async with httpx.AsyncClient(base_url=gateway.url, timeout=60) as http:
        answer = await http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert "min_tokens=20 is more than max_tokens=5" in answer.text


async def test_values_keep_their_text() -> None:
    names = {"seed": "sampling_seed"}
    made = named(InvalidRequest("seed 'a seed' of the seeds, got 'seed'"), names)
    assert str(made) == "sampling_seed 'a seed' of the seeds, got 'seed'"
    other = ValueError("seed")
    assert named(other, names) is other
