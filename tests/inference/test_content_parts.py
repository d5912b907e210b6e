"""Messages whose content is a list of parts, with chat templates like Qwen3's and Qwen2.5-VL's.

The prompt must equal the prompt of the same messages with plain text, wherever the API accepts
messages.
"""

from __future__ import annotations

import copy
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import sglrl
from sglrl.launching.tiny_model import make_tokenizer

_BEGIN = "<|im_start|>{{ m.role }}\n"
_END = "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
TEMPLATES = {
    # This template drops content that is not a string, without an error.
    "qwen3": (
        "{% for m in messages %}{% if m.content is string %}{% set content = m.content %}"
        "{% else %}{% set content = '' %}{% endif %}" + _BEGIN + "{{ content }}"
        "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function.name }}</tool_call>"
        "{% endfor %}" + _END
    ),
    "qwen-vl": (
        "{% for m in messages %}" + _BEGIN + "{% if m.content is string %}{{ m.content }}"
        "{% else %}{% for part in m.content or [] %}{% if part.type == 'text' %}{{ part.text }}"
        "{% else %}<|image_pad|>{% endif %}{% endfor %}{% endif %}" + _END
    ),
}


def text(value: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **more}


CALL: dict[str, Any] = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {}}}],
}
PARTS: list[dict[str, Any]] = [
    {"role": "system", "content": (text("Answer "), text("with a "), text("number."))},
    {"role": "user", "content": [text("2 + 2?", cache_control={"type": "ephemeral"})]},
    CALL,
    {"role": "tool", "content": [text("4")]},
    {"role": "user", "content": []},
]
TEXTS: list[dict[str, Any]] = [
    {"role": "system", "content": "Answer with a number."},
    {"role": "user", "content": "2 + 2?"},
    CALL,
    {"role": "tool", "content": "4"},
    {"role": "user", "content": ""},
]


@pytest.fixture(params=TEMPLATES)
async def client(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[sglrl.Client]:
    tokenizer = make_tokenizer(tmp_path, 512)
    tokenizer.chat_template = TEMPLATES[request.param]
    tokenizer.save_pretrained(tmp_path)
    async with sglrl.launch(tmp_path, engine="fake", vocab_size=512) as client:
        yield client


def prompt_of(client: sglrl.Client, messages: list[dict[str, Any]]) -> list[int]:
    tokenizer = client.tokenizer
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids: list[int] = tokenizer(rendered, add_special_tokens=False)["input_ids"]
    return ids


async def test_parts_of_text_are_the_text(client: sglrl.Client) -> None:
    given = copy.deepcopy(PARTS)
    expected = prompt_of(client, TEXTS)
    completion = await client.generate(messages=given, max_new_tokens=1)
    assert completion.prompt_ids.tolist() == expected
    both = await client.generate(messages=[given, TEXTS], max_new_tokens=1)
    assert [found.prompt_ids.tolist() for found in both] == [expected] * 2
    stream = client.stream(messages=given, max_new_tokens=1)
    async for _ in stream:
        pass
    assert stream.completion.prompt_ids.tolist() == expected
    assert given == PARTS, "the caller's messages are as they were"


async def test_in_a_session(client: sglrl.Client) -> None:
    given = copy.deepcopy(PARTS)
    observed = {"role": "tool", "content": [text("5"), text(" or 6")]}
    kept = copy.deepcopy(observed)
    ids = []
    for opening, new in [(TEXTS, {"role": "tool", "content": "5 or 6"}), (given, observed)]:
        async with client.session(messages=opening, max_new_tokens=4) as session:
            await session.generate()
            session.observe(new)
            session.observe([new, new])
            await session.generate()
            ids.append(session.ids.tolist())
    assert ids[0] == ids[1]
    assert ids[0][: len(prompt_of(client, TEXTS))] == prompt_of(client, TEXTS)
    assert (given, observed) == (PARTS, kept), "the caller's messages are as they were"


@pytest.mark.parametrize("processes", [None, 1])
async def test_in_the_items_of_a_run(client: sglrl.Client, processes: int | None) -> None:
    async def agent(session: sglrl.Session, item: Any) -> float:
        await session.generate(max_new_tokens=1)
        return 1.0

    items = [PARTS, {"messages": PARTS}, {"prompt": PARTS}]
    run = sglrl.rollout(client, agent, items, processes=processes)
    found = [t.prompt_ids.tolist() async for group in run for t in group.trajectories]
    assert found == [prompt_of(client, TEXTS)] * 3


IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}


async def test_an_image_is_refused_wherever_messages_are_given(client: sglrl.Client) -> None:
    messages = [TEXTS[0], {"role": "user", "content": [text("what is it?"), IMAGE]}]

    def refused(place: str) -> Any:
        error = re.escape(f"messages{place}['content'][1] is of type 'image_url'")
        return pytest.raises(sglrl.InvalidRequest, match=f"^{error}")

    with refused("[1]"):
        await client.generate(messages=messages)
    with refused("[1][1]"):
        await client.generate(messages=[TEXTS, messages])
    with refused("[1]"):
        client.session(messages=messages)
    with refused("[1]"):
        async for _ in client.stream(messages=messages):
            pass
    async with client.session(messages=TEXTS, max_new_tokens=1) as session:
        await session.generate()
        with refused("[1]"):
            session.observe(messages)
        with refused("[0]"):
            session.observe(messages[1])
        assert not session._pending
