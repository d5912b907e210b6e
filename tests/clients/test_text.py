"""OpenAI's completions of text, which also base models have."""

from __future__ import annotations

from typing import Any

import litellm
import openai
import pytest

pytestmark = pytest.mark.asyncio(loop_scope="session")

WORD: Any = {"regex": "[a-z]{4,12}"}


async def test_openai(runs: Any) -> None:
    """Each prompt begins a branch: text has other tokens than the turns that it comes from."""
    text = "One two "
    async with (
        runs() as run,
        openai.AsyncOpenAI(base_url=run.base_url, api_key=run.api_key) as client,
    ):
        for _ in range(2):
            made = await client.completions.create(model="any", prompt=text, extra_body=WORD)
            text += made.choices[0].text
        stream = await client.completions.create(
            model="any", prompt=text, stream=True, extra_body=WORD
        )
        parts = [chunk.choices[0].text async for chunk in stream if chunk.choices]
    assert 4 <= len("".join(parts)) <= 12
    assert len(run.calls) == 3
    run.check(leaves=3)


async def test_litellm(runs: Any) -> None:
    async with runs() as run:
        made = await litellm.atext_completion(
            model="text-completion-openai/any", prompt="One two ", api_base=run.base_url,
            api_key=run.api_key, extra_body=WORD,
        )  # fmt: skip
        assert made.choices[0].text
    assert len(run.calls) == 1
    run.check(leaves=1)
