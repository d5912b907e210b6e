"""What a random model proves little about: stop strings, streams, chats and JSON in English."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

import sglrl

from .reference import Reference

pytestmark = pytest.mark.asyncio(loop_scope="session")
QUESTION = [{"role": "user", "content": "Write one sentence about the sea."}]


@pytest.fixture(scope="module")
def reference(smollm2: str) -> Reference:
    return Reference(Path(smollm2), "float32")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def client(smollm2: str) -> AsyncIterator[sglrl.Client]:
    async with sglrl.launch(smollm2, device="cpu", dtype="float32") as client:
        yield client


@pytest.fixture(scope="module")
def sentence(reference: Reference) -> tuple[list[int], str]:
    """Return the greedy answer of transformers: its tokens, and its text."""
    prompt = reference.tokenizer.apply_chat_template(
        QUESTION, add_generation_prompt=True, return_dict=False
    )
    ids = reference.greedy(prompt, 24)
    return ids, reference.tokenizer.decode(ids, skip_special_tokens=True)


async def test_stop_strings(
    client: sglrl.Client, reference: Reference, sentence: tuple[list[int], str]
) -> None:
    ids, text = sentence
    words = text.split()
    assert len(words) > 8
    # Within a word, across words, and one that ends with the last characters of a token.
    for stop in (words[4][1:3], f"{words[3][-1]} {words[4][:2]}", f"{words[5]} "):
        made = await client.generate(
            messages=QUESTION, temperature=0, max_new_tokens=24, stop=["not there", stop]
        )
        assert made.text == text[: text.index(stop)]
        assert made.finish_reason == "stop"
        # The tokens end with the first one that completes the stop string.
        whole = [
            n
            for n in range(1, len(ids) + 1)
            if stop in reference.tokenizer.decode(ids[:n], skip_special_tokens=True)
        ]
        assert made.output_ids.tolist() == ids[: whole[0]]


async def test_a_stream_is_the_text(client: sglrl.Client, sentence: tuple[list[int], str]) -> None:
    text, pieces = "", 0
    async for chunk in client.stream(messages=QUESTION, temperature=0, max_new_tokens=24):
        text, pieces = text + chunk.text, pieces + 1
    assert text == sentence[1]
    assert pieces > 2


async def test_a_chat_of_two_turns(client: sglrl.Client, reference: Reference) -> None:
    session = client.session(
        messages=[{"role": "user", "content": "What is the capital of France?"}]
    )
    first = await session.generate(temperature=0, max_new_tokens=16)
    assert first.text == "The capital of France is Paris."
    session.observe({"role": "user", "content": "And of Italy?"})
    second = await session.generate(temperature=0, max_new_tokens=16)
    conversation = [
        {"role": "user", "content": "What is the capital of France?"},
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "And of Italy?"},
    ]
    prompt = reference.tokenizer.apply_chat_template(
        conversation, add_generation_prompt=True, return_dict=False
    )
    assert second.prompt_ids.tolist() == prompt
    assert second.output_ids.tolist() == reference.greedy(prompt, len(second.output_ids))
    assert "Rome" in second.text


async def test_json_of_a_schema(client: sglrl.Client) -> None:
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {"capital": {"type": "string"}, "letters": {"type": "integer"}},
        "required": ["capital", "letters"],
    }
    made = await client.generate(
        messages=[{"role": "user", "content": "What is the capital of France? Answer in JSON."}],
        temperature=0,
        max_new_tokens=40,
        json_schema=json.dumps(schema),
    )
    answer = json.loads(made.text)
    assert answer["capital"] == "Paris"
    assert type(answer["letters"]) is int
