"""The types of ``Client.generate``. mypy checks this file; nothing runs it."""

from __future__ import annotations

from typing import assert_type

import numpy as np

import sglrl
from sglrl import Completion


async def one_prompt(client: sglrl.Client) -> None:
    assert_type(await client.generate("a"), Completion)
    assert_type(await client.generate("a", max_new_tokens=3), Completion)
    assert_type(await client.generate("a", n=2), list[Completion])
    assert_type(await client.generate(input_ids=[1, 2]), Completion)
    assert_type(await client.generate(input_ids=(1, 2), n=1), Completion)
    assert_type(await client.generate(input_ids=np.array([1, 2])), Completion)
    assert_type(await client.generate(input_ids=[1, 2], n=4), list[Completion])
    messages = [{"role": "user", "content": "a"}]
    assert_type(await client.generate(messages=messages), Completion)
    assert_type(await client.generate(messages=messages, n=2), list[Completion])


async def several_prompts(client: sglrl.Client) -> None:
    assert_type(await client.generate(["a", "b"]), list[Completion])
    assert_type(await client.generate(["a", "b"], n=2), list[list[Completion]])
    assert_type(await client.generate(input_ids=[[1], [2]]), list[Completion])
    assert_type(await client.generate(input_ids=[[1], [2]], n=2), list[list[Completion]])
    assert_type(await client.generate(input_ids=[np.array([1])]), list[Completion])
    conversations = [[{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]]
    assert_type(await client.generate(messages=conversations), list[Completion])
    assert_type(await client.generate(messages=conversations, n=2), list[list[Completion]])


async def names_and_values(client: sglrl.Client) -> None:
    messages = [{"role": "user", "content": "a"}]
    await client.generate(messages=messages, tools=[], template={"enable_thinking": False})
    await client.generate("a", max_tokens=3, stop=["."], sampling=sglrl.SamplingParams())
    # An unknown name, a wrong type, and an argument that is for messages only.
    await client.generate("a", max_new_token=3)  # type: ignore[call-overload]
    await client.generate("a", temperature="hot")  # type: ignore[call-overload]
    await client.generate("a", tools=[])  # type: ignore[call-overload]
    async with client.session("a", temperature=0.5) as session:
        assert_type(await session.generate(max_tokens=3), Completion)
        await session.generate(max_new_token=3)  # type: ignore[call-arg]


async def scores(client: sglrl.Client) -> None:
    assert_type(await client.score([1, 2]), sglrl.ScoreLogprobs)
    assert_type(await client.score([1, 2], top_logprobs=2), sglrl.Scores)
    assert_type(await client.score([[1, 2], [3]]), list[sglrl.ScoreLogprobs])
    assert_type(await client.score([[1, 2], [3]], top_logprobs=2), list[sglrl.Scores])
