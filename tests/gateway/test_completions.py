"""OpenAI's completions: requests and answers, and the openai client with the fake engine."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import openai
import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

import sglrl
from sglrl.errors import InvalidRequest
from sglrl.gateway.completions import CompletionAnswer, CompletionRequest, parse
from sglrl.gateway.dialect import Sent
from sglrl.gateway.serve import Gateway, serve

from .made import chunk, client_of, completion
from .test_chat import JSON


def body(**fields: Any) -> CompletionRequest:
    return parse(json.dumps({"prompt": "Hi", **fields}).encode())


def answer(**fields: Any) -> CompletionAnswer:
    return body(**fields).answer("tiny", "")


def test_names_of_openai_become_ours() -> None:
    fields: Any = {"stop": ["x"], "n": 2, "best_of": 2, "seed": 3, "logprobs": 4, "user": "me"}
    schema = {"type": "object"}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    (turn,) = body(max_tokens=7, priority=5, min_tokens=1, response_format=form, **fields).turns()
    assert turn.sampling == {
        "max_new_tokens": 7, "stop": ["x"], "seed": 3, "min_new_tokens": 1, "json_schema": schema,
    }  # fmt: skip
    assert (turn.prompt, turn.choices, turn.top_logprobs, turn.priority) == ("Hi", 2, 4, 5)
    (turn,) = body().turns()
    assert (turn.sampling, turn.choices, turn.stream) == ({"max_new_tokens": 16}, 1, False)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
def test_prompts(prompt: Any, prompts: list[Any]) -> None:
    assert [turn.prompt for turn in body(prompt=prompt).turns()] == prompts


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": None}, "Expected `str | array`"),
        ({"prompt": []}, "prompt is empty"),
        ({"prompt": [1, "a"]}, "prompt must be text, a list of token ids"),
        ({"prompt": [[1], "a"]}, "prompt must be text, a list of token ids"),
        ({"prompt": [True]}, "prompt must be text, a list of token ids"),
        ({"prompt": ["a"] * 50, "n": 100}, "asks for 5,000 completions; send at most 4,096"),
        ({"n": 0}, "n must be in 1..128"),
        ({"prompt": ["a", "b"], "return_routed_experts": True}, "needs n=1 and a single prompt"),
        ({"best_of": 3}, "best_of must equal n, got best_of=3, n=1"),
        ({"echo": True, "logprobs": 0, "stream": True}, "echo with logprobs, needs stream=false"),
        ({"prompt_logprobs": 0, "stream": True}, "needs stream=false"),
        ({"max_tokens": -1}, "max_tokens must be at least 0"),
        ({"suffix": "x"}, "the field 'suffix' is not supported; use a prompt with"),
        ({"messages": [{}]}, "'messages' is not supported; use POST /v1/chat/completions"),
        ({"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs is for messages"),
        ({"logprobs": True}, "Expected `int | null`, got `bool`"),
    ],
)
def test_a_field_is_honoured_or_rejected(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        body(**fields).turns()
    assert message in str(error.value)


def test_fields_that_ask_for_nothing_are_accepted() -> None:
    fields: Any = {"suffix": "", "best_of": 1, "echo": False, "logit_bias": None, "audio": None}
    assert len(body(chat_template_kwargs={}, **fields).turns()) == 1


@given(st.dictionaries(st.sampled_from([*CompletionRequest.__struct_fields__, "other"]), JSON))
def test_any_fields_are_parsed_or_rejected(fields: dict[str, Any]) -> None:
    with contextlib.suppress(InvalidRequest):
        body(**fields).turns()


# --- answers --------------------------------------------------------------------------------------


def test_a_whole_answer() -> None:
    made = answer(prompt=["x", "y"], n=2, return_token_ids=True).whole(
        [completion([at], prompt=[1] * (1 + at // 2), cached=at // 2) for at in range(4)]
    )
    assert [choice["text"] for choice in made["choices"]] == ["a", "b", "c", "d"]
    assert [choice["index"] for choice in made["choices"]] == [0, 1, 2, 3]
    assert made["choices"][3]["prompt_token_ids"] == [1, 1]
    assert made["choices"][3]["token_ids"] == [3]
    assert made["choices"][0]["weight_versions"] == [{"version": 0, "start": 0, "end": 1}]
    # Each prompt counts once.
    assert made["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 1},
    }


def test_logprobs() -> None:
    (choice,) = answer(logprobs=2).whole([completion([0, 3, 4], top=2)])["choices"]
    assert choice["logprobs"] == {
        "tokens": ["a", "d", "e"],
        "token_logprobs": [0.0, -1.5, -2.0],
        # The sampled token is listed in any case.
        "top_logprobs": [
            {"a": 0.0, "b": -0.5},
            {"a": -0.25, "b": -0.5, "d": -1.5},
            {"a": -0.25, "b": -0.5, "e": -2.0},
        ],
        "text_offset": [0, 1, 2],
    }
    (choice,) = answer(logprobs=0).whole([completion([0])])["choices"]
    assert choice["logprobs"]["top_logprobs"] is None


def test_offsets_of_parts_of_a_character() -> None:
    """Token 0 is a space, two tokens make one character, and token 9 has no text."""

    def decode(ids: Any, skip: bool) -> str:
        data = b"".join([b"\xc3" if i == 1 else b"\xa9" if i == 2 else b" " for i in ids if i < 9])
        return data.decode(errors="replace")

    ids = [0, 1, 2, 9, 0, 1, 2, 0]
    one = completion(ids, decode=decode)
    assert one.text == " é é "
    (choice,) = answer(logprobs=0).whole([one])["choices"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 1, 2, 2, 3, 3, 4]
    for sent, offsets in ((Sent(1, 1), [1, 1, 2, 2, 3, 3, 4]), (Sent(6, 3), [3, 4])):
        part = answer(logprobs=0)._choice(0, one, one.text, sent)
        assert part["logprobs"]["text_offset"] == offsets


def test_the_prompt_is_echoed() -> None:
    for prompt, text in (("What?", "What?ab"), ([7, 8], "hiab")):
        (choice,) = answer(prompt=prompt, echo=True).whole([completion([0, 1])])["choices"]
        assert choice["text"] == text
    made = answer(prompt=["x", "y"], n=2, echo=True).whole([completion([0])] * 4)
    assert [choice["text"] for choice in made["choices"]] == ["xa", "xa", "ya", "ya"]


def test_policy_versions_and_the_reason_of_an_abort() -> None:
    chunks = [chunk([0], version=4), chunk([1], version=5), chunk([], finish="abort", version=6)]
    (choice,) = answer().whole([completion([], chunks=chunks)])["choices"]
    assert choice["finish_reason"] == "abort"
    assert choice["weight_versions"] == [
        {"version": 4, "start": 0, "end": 1},
        {"version": 5, "start": 1, "end": 2},
    ]


# --- with the fake engine, which repeats the prompt -----------------------------------------------


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[sglrl.Client]:
    async with sglrl.launch("tiny", engine="fake", step_seconds=0.002, tokens_per_step=1) as client:
        yield client


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(pool: sglrl.Client) -> AsyncIterator[Gateway]:
    async with serve(pool, name="tiny") as gateway:
        yield gateway


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(gateway: Gateway) -> AsyncIterator[openai.AsyncOpenAI]:
    async with client_of(gateway) as client:
        yield client


@pytest.mark.asyncio(loop_scope="module")
async def test_texts_and_tokens(client: openai.AsyncOpenAI, pool: sglrl.Client) -> None:
    hello, world = (pool.tokenizer(text)["input_ids"] for text in ("Hello", "world"))
    for prompt in (["Hello", "world"], [hello, world]):
        made = await client.completions.create(model="tiny", prompt=prompt, n=2, max_tokens=5)
        texts = [choice.text for choice in made.choices]
        wanted = [pool.tokenizer.decode((ids * 5)[:5]) for ids in (hello, world)]
        assert texts == [wanted[0], wanted[0], wanted[1], wanted[1]]
        assert [choice.finish_reason for choice in made.choices] == ["length"] * 4
        assert made.usage is not None
        assert made.usage.prompt_tokens == len(hello) + len(world)
        assert made.usage.completion_tokens == 20
    default = await client.completions.create(model="tiny", prompt=hello)
    assert default.usage is not None
    assert default.usage.completion_tokens == 16


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("in_session", [False, True])
async def test_scores_of_prompts(gateway: Gateway, pool: sglrl.Client, in_session: bool) -> None:
    """As lm-evaluation-harness asks for them. In a session, they are no turn."""
    hello = pool.tokenizer("Hello")["input_ids"]
    values: Any = {"model": "tiny", "prompt": [hello, hello[:2]], "max_tokens": 0, "echo": True}
    values |= {"temperature": 0, "seed": 1, "best_of": 1}
    async with gateway.session() as session, client_of(session if in_session else gateway) as api:
        made = await api.completions.create(**values, logprobs=2)
        for choice, ids in zip(made.choices, (hello, hello[:2]), strict=True):
            scores = await pool.score(ids)
            assert choice.text == pool.tokenizer.decode(ids)
            assert choice.finish_reason == "length"
            found = choice.logprobs
            assert found is not None
            assert found.tokens == [pool.tokenizer.decode([id_]) for id_ in ids]
            assert found.token_logprobs is not None
            assert found.token_logprobs[0] is None
            np.testing.assert_allclose(found.token_logprobs[1:], scores[1:], atol=1e-6)  # type: ignore[index,arg-type]
            assert found.top_logprobs is not None
            assert len(found.top_logprobs) == len(ids)
        assert made.usage is not None
        assert made.usage.completion_tokens == 0
        plain = await api.completions.create(**values)
        assert plain.choices[0].text == made.choices[0].text
        parts = [part async for part in await api.completions.create(**values, stream=True)]
        texts = ["", ""]
        for part in parts:
            for choice in part.choices:
                texts[choice.index] += choice.text
        assert texts == [choice.text for choice in made.choices]
    assert session.trajectory is None


@pytest.mark.asyncio(loop_scope="module")
async def test_a_stream_is_the_whole_answer(client: openai.AsyncOpenAI) -> None:
    values: Any = {"model": "tiny", "prompt": ["Hé🙂!", "b"], "max_tokens": 300}
    values |= {"extra_body": {"return_token_ids": True}, "echo": True}
    whole = await client.completions.create(**values)
    texts, tokens, reasons = ["", ""], [[], []], {}
    parts = [
        part
        async for part in await client.completions.create(
            stream=True, stream_options={"include_usage": True}, **values
        )
    ]
    for part in parts[:-1]:
        (choice,) = part.choices
        texts[choice.index] += choice.text
        tokens[choice.index] += choice.token_ids
        if choice.finish_reason:
            reasons[choice.index] = choice.finish_reason
    assert len(parts) > 5
    assert texts == [choice.text for choice in whole.choices]
    assert tokens == [choice.token_ids for choice in whole.choices]
    assert reasons == {0: "length", 1: "length"}
    assert (parts[-1].choices, parts[-1].usage) == ([], whole.usage)


@pytest.mark.asyncio(loop_scope="module")
async def test_logprobs_of_a_stream(client: openai.AsyncOpenAI) -> None:
    values: Any = {"model": "tiny", "prompt": "Hé🙂!", "max_tokens": 100, "logprobs": 2}
    whole = (await client.completions.create(**values)).choices[0].logprobs
    assert whole is not None
    assert whole.top_logprobs is not None
    # Token 0 and token 1, and the sampled one.
    assert {len(top) for top in whole.top_logprobs} <= {2, 3}
    parts = [
        part.choices[0].logprobs.model_dump()
        async for part in await client.completions.create(stream=True, **values)
        if part.choices[0].logprobs
    ]
    joined = {name: [one for part in parts for one in part[name]] for name in parts[0]}
    assert joined == whole.model_dump()


@pytest.mark.asyncio(loop_scope="module")
async def test_errors(client: openai.AsyncOpenAI) -> None:
    wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"model": "gpt"}, openai.NotFoundError, "there is no model 'gpt'"),
        ({"prompt": ""}, openai.BadRequestError, "the prompt is empty"),
        ({"prompt": [10**7]}, openai.BadRequestError, "token id 10000000 is outside"),
        ({"prompt": [[1], []]}, openai.BadRequestError, "the prompt is empty"),
        (
            {"prompt": [1] * 40_000},
            openai.BadRequestError,
            "is longer than the model's context length",
        ),
        ({"temperature": -1}, openai.BadRequestError, "temperature must be in"),
        ({"logprobs": 2000}, openai.BadRequestError, "400 - .*: 'logprobs must be in"),
    ]
    for change, kind, message in wrong:
        values: Any = {"model": "tiny", "prompt": "Hi", **change}
        for more in ({}, {"stream": True}):
            with pytest.raises(kind, match=message):
                await client.completions.create(**values, **more)
