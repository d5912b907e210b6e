"""OpenAI's client against the gateway and the real engine: every call is in the trajectory."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import pytest_asyncio
import torch
from engine.policies import until_running
from engine.reference import Reference
from sessions.families import FAMILIES, family_tokenizer

import sglrl
from sglrl.gateway.serve import Gateway, serve
from sglrl.launching.tiny_model import make_model

pytestmark = pytest.mark.asyncio(loop_scope="session")

ASK = [{"role": "user", "content": "What is 2 + 3?"}]
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name} two digits",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "minimum": 0, "maximum": 9},
                    "b": {"type": "integer", "minimum": 0, "maximum": 9},
                },
                "required": ["a", "b"],
            },
        },
    }
    for name in ("add", "multiply")
]


@pytest.fixture(scope="module")
def policy(models: Path) -> Reference:
    folder = make_model(models / "qwen3-gateway")
    family_tokenizer(folder, FAMILIES["qwen3"])
    return Reference(folder)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pool(policy: Reference) -> AsyncIterator[sglrl.Client]:
    async with sglrl.launch(policy.folder, device="cpu", replicas=2) as client:
        yield client


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def gateway(pool: sglrl.Client) -> AsyncIterator[Gateway]:
    async with serve(pool, name="policy") as gateway:
        yield gateway


def agent_of(session: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key)


def rewritten_tokens(tokenizer: Any) -> list[int]:
    """Return tokens that Qwen3's template rewrites when the user asks again.

    They are special tokens, and tokens with white space at their ends.
    """
    texts = {token: tokenizer.decode([token]) for token in range(len(tokenizer))}
    odd = [token for token, text in texts.items() if not text or text != text.strip()]
    return sorted({*odd, *tokenizer.get_added_vocab().values()})


@pytest.fixture(scope="module")
def banned(policy: Reference) -> list[int]:
    return rewritten_tokens(policy.tokenizer)


@pytest.fixture(scope="module")
def words(banned: list[int]) -> dict[str, Any]:
    return {"logit_bias": dict.fromkeys(banned, -100)}


def check(policy: Reference, banned: list[int], trajectory: sglrl.Trajectory) -> int:
    """Compare every logprob with transformers'. Return how many tokens were sampled."""
    sampled = 0
    for leaf in trajectory.leaves:
        ids = np.concatenate([leaf.prompt_ids, leaf.response_ids])
        logits = policy.logits(ids).clone()
        logits[:, banned] -= 100
        rows = torch.log_softmax(logits, -1).numpy()[len(leaf.prompt_ids) - 1 : -1]
        expected = rows[np.arange(len(rows)), leaf.response_ids]
        mask = leaf.loss_mask
        np.testing.assert_allclose(leaf.logprobs[mask], expected[mask], atol=2e-4)
        sampled += int(mask.sum())
    return sampled


CALL = r'<tool_call>\n\{"name": "add", "arguments": \{"a": [0-9], "b": [0-9]\}\}\n</tool_call>'


async def test_a_conversation(
    gateway: Gateway, policy: Reference, words: Any, banned: list[int]
) -> None:
    messages: list[Any] = list(ASK)
    sampled = 0
    async with gateway.session({"task": 7}) as session:
        async with agent_of(session) as agent:
            for _ in range(4):
                answer = await agent.chat.completions.create(
                    model="any", messages=messages, max_tokens=9, **words
                )
                assert answer.usage is not None
                sampled += answer.usage.completion_tokens
                said = answer.choices[0].message
                messages += [said.model_dump(), {"role": "user", "content": "And then?"}]
        await session.reward(0.5)
        await session.reward(1.0, "style")
    trajectory = session.trajectory
    assert trajectory is not None
    assert "And then?" in trajectory.text
    assert trajectory.branches == ()
    assert len(trajectory.turns) == 4
    assert check(policy, banned, trajectory) == sampled
    assert trajectory.metadata == {"task": 7}
    assert trajectory.reward == 1.5
    assert trajectory.named_rewards == {"style": 1.0}


async def test_calls_of_tools(gateway: Gateway, policy: Reference, pool: sglrl.Client) -> None:
    """A client returns calls in its own form, and without the reasoning."""
    tags = ("</think>", "<think>", "<tool_call>", "</tool_call>", "<|im_end|>")
    bias = {str(pool.tokenizer.convert_tokens_to_ids(tag)): 100 for tag in tags}
    thinks_and_calls = {"regex": rf"<think>\n[a-z]{{9}}\n</think>\n\n{CALL}\n{CALL}"}
    messages: list[Any] = list(ASK)
    async with gateway.session() as session, agent_of(session) as agent:
        for _ in range(3):
            answer = await agent.chat.completions.create(
                model="any", messages=messages, tools=TOOLS, logit_bias=bias,
                extra_body=thinks_and_calls,
            )  # fmt: skip
            (choice,) = answer.choices
            assert choice.finish_reason == "tool_calls"
            assert choice.message.tool_calls
            calls: list[Any] = choice.message.tool_calls
            assert len(calls) == 2
            assert all(json.loads(made.function.arguments).keys() == {"a", "b"} for made in calls)
            assert getattr(choice.message, "reasoning_content", None)
            said = {
                "role": "assistant",
                "tool_calls": [
                    {
                        "id": made.id,
                        "type": "function",
                        "function": {
                            "name": made.function.name,
                            "arguments": json.dumps(json.loads(made.function.arguments), indent=1),
                        },
                    }
                    for made in calls
                ],
            }
            results = [{"role": "tool", "tool_call_id": made.id, "content": "5"} for made in calls]
            messages += [said, *results]
        await session.reward(1.0, "call", call=calls[0].id)
    trajectory = session.trajectory
    assert trajectory is not None
    assert trajectory.branches == ()
    assert len(trajectory.turns) == 3
    assert trajectory.messages is not None
    assert [message["role"] for message in trajectory.messages if message["role"] != "tool"] == [
        "user", *["assistant"] * 3,
    ]  # fmt: skip
    assert all(
        message["reasoning_content"]
        for message in trajectory.messages
        if message["role"] == "assistant"
    )
    assert trajectory.turns[-1].rewards[0].value == 1.0
    rows = trajectory.response_ids[trajectory.loss_mask]
    assert len(rows) == sum(turn.stop - turn.start for turn in trajectory.turns)


async def test_other_conversations_are_branches(
    gateway: Gateway, policy: Reference, words: Any, banned: list[int]
) -> None:
    async with gateway.session() as session, agent_of(session) as agent:

        async def ask(messages: list[Any], **more: Any) -> Any:
            made = await agent.chat.completions.create(
                model="any", messages=messages, max_tokens=6, **words, **more
            )
            return [choice.message.model_dump() for choice in made.choices]

        first, second = await ask(ASK, n=2, seed=3)
        assert first["content"] != second["content"]
        await ask([*ASK, second, {"role": "user", "content": "And?"}])
        # A sub-agent, and three at the same time.
        await asyncio.gather(*[ask([{"role": "user", "content": f"Task {i}"}]) for i in range(3)])
        # A conversation that ends with an answer has a turn after it, like any other.
        await ask([*ASK, second])
        compacted = [{"role": "user", "content": "It was about 2 + 3."}]
        await ask(compacted)
    trajectory = session.trajectory
    assert trajectory is not None
    assert check(policy, banned, trajectory) == sum(
        turn.stop - turn.start for leaf in trajectory.leaves for turn in leaf.turns
    )
    assert sum(len(leaf.turns) for leaf in trajectory.leaves) == 8
    assert len(trajectory.leaves) == 7
    assert trajectory.messages is not None
    assert trajectory.messages[0] == compacted[0]


async def test_a_stream(gateway: Gateway, policy: Reference, words: Any, banned: list[int]) -> None:
    async with gateway.session() as session, agent_of(session) as agent:
        chunks = [
            chunk
            async for chunk in await agent.chat.completions.create(
                model="any",
                messages=ASK,
                max_tokens=30,
                **words,
                stream=True,
                logprobs=True,
                stream_options={"include_usage": True},
            )
        ]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert chunks[-2].choices[0].finish_reason in ("stop", "length")
        assert chunks[-1].usage is not None
        tokens = chunks[-1].usage.completion_tokens
        again = [*ASK, {"role": "assistant", "content": text}, *ASK]
        await agent.chat.completions.create(model="any", messages=again, max_tokens=3, **words)
    trajectory = session.trajectory
    assert trajectory is not None
    assert trajectory.branches == ()
    first, _ = trajectory.turns
    assert first.stop - first.start == tokens
    check(policy, banned, trajectory)


async def test_text_arrives_before_the_end(client: sglrl.Client) -> None:
    """A model without a format for calls."""
    async with serve(client, name="policy") as gateway:
        agent = openai.AsyncOpenAI(base_url=gateway.url + "/v1", api_key="x")
        values: Any = {"model": "policy", "messages": ASK, "temperature": 0, "max_tokens": 40}
        whole = await agent.chat.completions.create(**values)
        parts = [
            chunk.choices[0].delta.content
            async for chunk in await agent.chat.completions.create(stream=True, **values)
        ]
        assert len([part for part in parts if part]) > 3
        assert "".join(part or "" for part in parts) == whole.choices[0].message.content
        cut = await agent.chat.completions.create(stop=parts[5], stream=True, **values)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in cut])
        assert whole.choices[0].message.content is not None
        assert text == whole.choices[0].message.content.partition(parts[5] or "")[0]
        await agent.close()


async def test_reasoning_arrives_before_the_calls(gateway: Gateway, pool: sglrl.Client) -> None:
    tags = ("</think>", "<think>", "<tool_call>", "</tool_call>", "<|im_end|>")
    bias = {str(pool.tokenizer.convert_tokens_to_ids(tag)): 100 for tag in tags}
    pattern = rf"<think>\n[a-z]{{60}}\n</think>\n\n[a-z]{{60}}\n{CALL}"
    async with gateway.session() as session, agent_of(session) as agent:
        values: Any = {"model": "any", "messages": ASK, "tools": TOOLS, "logit_bias": bias}
        values |= {"extra_body": {"regex": pattern}, "seed": 3}
        chunks = [
            chunk.choices[0].delta.model_dump(exclude_none=True)
            async for chunk in await agent.chat.completions.create(stream=True, **values)
        ]
        joined = {
            part: "".join(chunk.get(part, "") for chunk in chunks)
            for part in ("reasoning_content", "content")
        }
    # In the same session, the same request would have another seed.
    async with gateway.session() as session, agent_of(session) as agent:
        answer = await agent.chat.completions.create(**values)
    said = answer.choices[0].message.model_dump()
    assert joined["reasoning_content"] == said["reasoning_content"].strip()
    assert joined["content"] == said["content"].strip()
    kinds = [next(iter(chunk)) for chunk in chunks if "role" not in chunk and chunk]
    assert kinds == sorted(kinds, key=["reasoning_content", "content", "tool_calls"].index)
    assert kinds.count("reasoning_content") > 3
    assert kinds.count("content") > 3
    (calls,) = [chunk["tool_calls"] for chunk in chunks if "tool_calls" in chunk]
    assert calls[0]["function"] == said["tool_calls"][0]["function"]


async def test_logprobs_and_usage_of_a_stream(gateway: Gateway, pool: sglrl.Client) -> None:
    """Each event has the logprobs of its tokens, also of those that no text shows."""
    bias = {pool.tokenizer.convert_tokens_to_ids(tag): 100 for tag in ("<think>", "</think>")}
    pattern = r"<think>\n[a-z]{9}\n</think>\n\n[a-z]{5}"
    values: Any = {"model": "any", "messages": ASK, "logit_bias": bias, "seed": 5}
    values |= {"extra_body": {"regex": pattern}, "logprobs": True, "top_logprobs": 3}
    async with gateway.session() as session, agent_of(session) as agent:
        whole = await agent.chat.completions.create(**values)
    # In the same session, the same request would have another seed.
    async with gateway.session() as session, agent_of(session) as agent:
        parts = [
            part
            async for part in await agent.chat.completions.create(
                stream=True, stream_options={"include_usage": True}, **values
            )
        ]
    (choice,) = whole.choices
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert whole.usage is not None
    assert whole.usage.completion_tokens_details is not None
    names = [token.token for token in choice.logprobs.content]
    assert whole.usage.completion_tokens == len(names)
    thought = whole.usage.completion_tokens_details.reasoning_tokens
    assert thought is not None
    assert "".join(names[:thought]).strip().endswith(choice.message.reasoning_content.strip())  # type: ignore[attr-defined]
    assert parts.pop().usage == whole.usage
    streamed = [part.choices[0].logprobs for part in parts]
    found = [token for one in streamed if one for token in one.content or ()]
    assert found == choice.logprobs.content
    assert sum(one is not None for one in streamed) > 2


async def test_a_structural_tag(gateway: Gateway) -> None:
    form: Any = {"type": "structural_tag", "format": {"type": "const_string", "value": "Six {.}"}}
    async with gateway.session() as session, agent_of(session) as agent:
        answer = await agent.chat.completions.create(
            model="any", messages=ASK, response_format=form
        )
    (choice,) = answer.choices
    assert (choice.message.content, choice.finish_reason) == ("Six {.}", "stop")


async def test_a_repeated_request_is_the_same_turn(gateway: Gateway) -> None:
    """As OpenAI's client repeats one, with the number of the retry in a header."""
    async with gateway.session() as session, agent_of(session) as agent:
        values: Any = {"model": "any", "messages": ASK, "max_tokens": 8}
        again = {"extra_headers": {"x-stainless-retry-count": "1"}}
        one = await agent.chat.completions.create(**values)
        same = await agent.chat.completions.create(**values, **again)
        assert same.choices[0].message == one.choices[0].message
        other = await agent.chat.completions.create(**values)
        assert other.choices[0].message != one.choices[0].message
        # Two at the same time, the first of which gives up.
        slow: Any = {"model": "any", "messages": [*ASK, *ASK], "max_tokens": 300}
        with pytest.raises(openai.APITimeoutError):
            await agent.with_options(timeout=0.05, max_retries=0).chat.completions.create(**slow)
        made = await agent.chat.completions.create(**slow, **again)
        once = await agent.chat.completions.create(**slow, **again)
        assert made.choices[0].message == once.choices[0].message
    assert session.trajectory is not None
    assert sum(len(leaf.turns) for leaf in session.trajectory.leaves) == 3


async def test_updates_and_lost_workers_are_not_seen(
    gateway: Gateway, pool: sglrl.Client, policy: Reference, words: Any, banned: list[int]
) -> None:
    """Two weight updates and a kill within turns: versions are right, and no agent notices."""
    states = [{name: v.clone() for name, v in policy.model.state_dict().items()}]
    updates = []
    async with gateway.session() as session, agent_of(session) as agent:
        messages: list[Any] = list(ASK)
        spans: list[Any] = []
        updated = asyncio.Event()

        async def talk() -> None:
            for number in range(3):
                if number == 2:
                    # At least this turn has the version of the first update.
                    await updated.wait()
                answer = await agent.chat.completions.create(
                    model="any", messages=messages, max_tokens=150, **words
                )
                messages.extend([answer.choices[0].message.model_dump(), *ASK])
                spans.extend(answer.choices[0].weight_versions)  # type: ignore[attr-defined]

        talking = asyncio.ensure_future(talk())
        for number in range(2):
            await until_running(pool, 1)
            updates.append(await pool.update_weights(states[0], inflight="abort"))
            if number == 0:
                updated.set()
                os.kill(pool.workers[0].pid, signal.SIGKILL)
        await asyncio.wait_for(talking, 300)
    trajectory = session.trajectory
    assert trajectory is not None
    assert trajectory.branches == ()
    assert check(policy, banned, trajectory) == 450
    assert updates[0].version in {span["version"] for span in spans}
    assert sorted({int(v) for v in trajectory.versions[trajectory.loss_mask]}) == sorted(
        {span["version"] for span in spans}
    )


async def test_errors(gateway: Gateway, pool: sglrl.Client) -> None:
    async with openai.AsyncOpenAI(base_url=gateway.url + "/v1", api_key="x", max_retries=0) as ai:
        assert [model.id async for model in ai.models.list()] == ["policy"]
        wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
            ({"model": "gpt"}, openai.NotFoundError, "there is no model 'gpt'; there is: policy"),
            ({"max_tokens": 0}, openai.BadRequestError, "max_tokens must be at least 1, got 0"),
            ({"messages": []}, openai.BadRequestError, "non-empty list"),
            ({"messages": [{"role": "user"}]}, openai.BadRequestError, "has no 'content'"),
            ({"extra_body": {"voice": 1}}, openai.BadRequestError, "'voice' is not supported"),
            ({"temperature": -1}, openai.BadRequestError, "temperature must be in"),
            (
                {"messages": [{"role": "user", "content": "x " * 5000}]},
                openai.BadRequestError,
                "context",
            ),
        ]
        for change, kind, message in wrong:
            values: Any = {"model": "policy", "messages": ASK, **change}
            for more in ({}, {"stream": True}):
                with pytest.raises(kind, match=message) as error:
                    await ai.chat.completions.create(**values, **more)
        assert error.value.code == "context_length_exceeded"  # type: ignore[attr-defined]
    async with httpx.AsyncClient(base_url=gateway.url) as http:
        assert (await http.get("/health")).json() == {"status": "ok"}
        missing = await http.get("/v2")
        assert missing.status_code == 404
        assert missing.json()["error"]["message"] == "there is no endpoint GET /v2"
        broken = await http.post("/v1/chat/completions", content=b"{")
        assert broken.status_code == 400
        assert "not a JSON object" in broken.json()["error"]["message"]


async def test_a_session_that_has_ended(gateway: Gateway) -> None:
    async with gateway.session() as session:
        pass
    assert session.trajectory is None
    values: Any = {"model": "policy", "messages": ASK}
    async with agent_of(session) as agent:
        with pytest.raises(openai.NotFoundError, match="has ended"):
            await agent.with_options(max_retries=0).chat.completions.create(**values)
    async with openai.AsyncOpenAI(
        base_url=gateway.url + "/v1", api_key=session.api_key, max_retries=0
    ) as agent:
        with pytest.raises(openai.AuthenticationError, match="the session of this key has ended"):
            await agent.chat.completions.create(**values)


async def test_sessions_over_http(gateway: Gateway, pool: sglrl.Client) -> None:
    """Programs in other languages open and reward sessions with requests."""
    async with (
        serve(pool, name="policy", api_key="secret") as closed,
        httpx.AsyncClient(base_url=closed.url) as http,
    ):
        assert (await http.post("/sessions")).status_code == 401
        assert (await http.get("/v1/models")).status_code == 401
        http.headers["authorization"] = "Bearer secret"
        made = (await http.post("/sessions", json={"metadata": {"a": 1}})).json()
        path = f"/sessions/{made['id']}"
        url = f"{path}/v1/chat/completions"
        assert made["base_url"] == f"{closed.url}{path}/v1"
        assert (await http.post(f"{path}/reward", json={"reward": 1})).status_code == 400
        body = {"messages": ASK, "max_tokens": 4}
        own = {"authorization": f"Bearer {made['api_key']}"}
        wrong = {"authorization": "Bearer wrong"}
        for at, headers, status in (
            ("/v1/chat/completions", own, 200), (url, wrong, 401), (url, own, 200),
        ):  # fmt: skip
            answer = await http.post(at, json=body, headers=headers)
            assert answer.status_code == status, answer.text
        given = await http.post(f"{path}/reward", json={"reward": {"a": 1, "b": 2}})
        assert given.status_code == 200, given.text
        assert (await http.post(f"{path}/reward", json={"value": 1})).status_code == 400
        rows = (await http.delete(path)).json()["trajectories"]
        assert len(rows) == 2
        assert (rows[-1]["reward"], rows[-1]["metadata"]) == (3.0, {"a": 1})
        for row in rows:
            assert len(row["logprobs"]) == len(row["response_ids"]) == len(row["loss_mask"])
        assert (await http.delete(path)).status_code == 404
