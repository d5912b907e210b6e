"""Text and token ids, instead of messages, in a session."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

import sglrl

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway() -> AsyncIterator[Any]:
    async with (
        sglrl.launch("tiny", engine="fake") as client,
        sglrl.serve(client, name="tiny") as gateway,
    ):
        yield gateway


async def test_a_prompt_that_begins_with_a_turn_continues_it(gateway: Any) -> None:
    async with gateway.session() as session, httpx.AsyncClient(timeout=60) as http:
        base = session.base_url.removesuffix("/v1")

        async def completions(prompt: list[int]) -> list[int]:
            body = {"prompt": prompt, "max_tokens": 3, "return_token_ids": True}
            answer = await http.post(f"{session.base_url}/completions", json=body)
            found: list[int] = answer.raise_for_status().json()["choices"][0]["token_ids"]
            return found

        async def native(prompt: list[int]) -> list[int]:
            body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 3}}
            answer = await http.post(f"{base}/generate", json=body)
            found: list[int] = answer.raise_for_status().json()["output_ids"]
            return found

        async def tokens_in(prompt: list[int]) -> list[int]:
            body = {"token_ids": prompt, "sampling_params": {"max_tokens": 3}}
            answer = await http.post(f"{base}/inference/v1/generate", json=body)
            found: list[int] = answer.raise_for_status().json()["choices"][0]["token_ids"]
            return found

        ids = [5, 6, 7]
        starts = []
        for ask in (completions, native, tokens_in):
            starts.append(len(ids))
            ids = [*ids, *await ask(ids), 9]
        await native([5, 6, 8])
        await session.reward(1.0)
    assert session.trajectory is not None
    other, one = session.trajectory, session.trajectory.branches[0]
    assert one.input_ids.tolist() == ids[:-1]
    assert [len(one.prompt_ids) + turn.start for turn in one.turns] == starts
    assert other.prompt_ids.tolist() == [5, 6, 8]
    assert (one.reward, other.reward) == (0.0, 1.0)


async def test_text_and_several_prompts(gateway: Any) -> None:
    async with gateway.session() as session, httpx.AsyncClient(timeout=60) as http:
        body = {"prompt": ["One", "two three"], "n": 2, "max_tokens": 3}
        answer = await http.post(f"{session.base_url}/completions", json=body)
        assert len(answer.raise_for_status().json()["choices"]) == 4
        body = {"prompt": "One", "stream": True, "max_tokens": 3}
        answer = await http.post(f"{session.base_url}/completions", json=body)
        assert answer.raise_for_status().text.endswith("data: [DONE]\n\n")
    assert session.trajectory is not None
    assert [leaf.sampled_tokens for leaf in session.trajectory.leaves] == [3] * 5
