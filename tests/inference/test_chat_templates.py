"""Arguments of the chat template: the prompt must equal transformers' rendering."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import sglrl
from sglrl.launching.tiny_model import make_tokenizer

TEMPLATE = (
    "{% for tool in tools or [] %}<tool>{{ tool | tojson }}</tool>\n{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    "{% endif %}"
)
ASK = [{"role": "user", "content": "Add one and two."}]
BEGUN = [*ASK, {"role": "assistant", "content": "The result is"}]


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first number
        b: the second number
    """
    return a + b


SCHEMA = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
}


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[sglrl.Client]:
    tokenizer = make_tokenizer(tmp_path, 512)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path)
    async with sglrl.launch(tmp_path, engine="fake", vocab_size=512) as client:
        yield client


def expected(client: sglrl.Client, messages: Any, **options: Any) -> list[int]:
    options = {"add_generation_prompt": True, **options}
    rendered = client.tokenizer.apply_chat_template(messages, tokenize=False, **options)
    ids: list[int] = client.tokenizer(rendered, add_special_tokens=False)["input_ids"]
    return ids


CASES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "a schema": (ASK, {"tools": [SCHEMA]}, {"tools": [SCHEMA]}),
    "a function": (ASK, {"tools": (add,)}, {"tools": [add]}),
    "template": (ASK, {"template": {"enable_thinking": False}}, {"enable_thinking": False}),
    "chat_template_kwargs": (
        ASK,
        {"chat_template_kwargs": {"enable_thinking": False}, "tools": [SCHEMA]},
        {"enable_thinking": False, "tools": [SCHEMA]},
    ),
    "continue_final_message": (
        BEGUN,
        {"continue_final_message": True, "tools": [SCHEMA]},
        {"continue_final_message": True, "add_generation_prompt": False, "tools": [SCHEMA]},
    ),
}


@pytest.mark.parametrize("name", CASES)
async def test_the_prompt_is_the_rendering_of_transformers(client: sglrl.Client, name: str) -> None:
    messages, given, options = CASES[name]
    ids = expected(client, messages, **options)
    assert ids != expected(client, messages)
    completion = await client.generate(messages=messages, max_tokens=2, **given)
    assert completion.prompt_ids.tolist() == ids
    several = await client.generate(messages=[messages, messages], n=2, max_tokens=2, **given)
    assert [c.prompt_ids.tolist() for group in several for c in group] == [ids] * 4
    stream = client.stream(messages=messages, max_new_tokens=2, **given)
    async for _ in stream:
        pass
    assert stream.completion.prompt_ids.tolist() == ids
    async with client.session(messages=messages, **given) as session:
        turn = await session.generate(max_new_tokens=2)
        assert turn.prompt_ids.tolist() == ids


async def agent(session: sglrl.Session, item: Any) -> float:
    await session.generate(max_new_tokens=2)
    return 1.0


@pytest.mark.parametrize("processes", [None, 1])
async def test_a_rollout_renders_like_a_session(
    client: sglrl.Client, processes: int | None
) -> None:
    options: dict[str, Any] = {"tools": [SCHEMA], "template": {"enable_thinking": False}}
    prompts = []
    async for group in sglrl.rollout(client, agent, [ASK], processes=processes, **options):
        prompts += [t.prompt_ids.tolist() for t in group.trajectories]
    assert prompts == [expected(client, ASK, tools=[SCHEMA], enable_thinking=False)]


async def test_a_session_continues_the_message_that_has_begun(client: sglrl.Client) -> None:
    """The next turn's prompt has one message: the beginning and the sampled rest."""
    async with client.session(messages=BEGUN, continue_final_message=True) as session:
        first = await session.generate(max_new_tokens=3)
        session.observe({"role": "user", "content": "Sure?"})
        second = await session.generate(max_new_tokens=3)
        answer = BEGUN[-1]["content"] + session_text(client, first)
        history = [*ASK, {"role": "assistant", "content": answer}]
        text = client.tokenizer.decode(second.prompt_ids.tolist(), skip_special_tokens=False)
        assert text == client.tokenizer.apply_chat_template(
            [*history, {"role": "user", "content": "Sure?"}],
            add_generation_prompt=True,
            tokenize=False,
        )
        assert session.ids[: len(first.prompt_ids)].tolist() == first.prompt_ids.tolist()


def session_text(client: sglrl.Client, turn: sglrl.Completion) -> str:
    text = client.tokenizer.decode(turn.output_ids.tolist(), skip_special_tokens=False)
    assert isinstance(text, str)
    return text


async def test_tools_that_the_template_does_not_write_are_rejected(client: sglrl.Client) -> None:
    """Whether it writes them is seen in the first prompt with tools, not in a sample of prompts."""
    silent = TEMPLATE.split("\n{% endfor %}", 1)[1]
    needs_system = silent + "{% if messages[0].role == 'system' %}{{ tools | tojson }}{% endif %}"
    be_brief = [{"role": "system", "content": "Be brief."}, *ASK]
    for template, messages, shows in (
        (silent, ASK, False),
        (needs_system, ASK, False),
        (needs_system, be_brief, True),
    ):
        given: dict[str, Any] = {"messages": messages, "template": {"chat_template": template}}
        await client.generate(**given, tools=[], max_new_tokens=1)
        async with client.session(**given, tools=[add], max_new_tokens=1) as session:
            if shows:
                await session.generate()
                continue
            for call in (
                session.generate(),
                client.generate(**given, tools=[add], max_new_tokens=1),
                anext(aiter(client.stream(**given, tools=[add], max_new_tokens=1))),
            ):
                with pytest.raises(sglrl.InvalidRequest, match="shows no tools: omit tools"):
                    await call


async def test_the_tiny_model_shows_tools() -> None:
    async with sglrl.launch("tiny", engine="fake") as client:
        made = await client.generate(messages=ASK, tools=[add], max_new_tokens=1)
        text = client.tokenizer.decode(made.prompt_ids.tolist())
        assert "Add two numbers." in text
        assert text.endswith(client.tokenizer.decode(expected(client, ASK)))


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no messages": ({"input_ids": [1], "tools": [SCHEMA]}, "tools is for messages"),
    "a prompt": ({"prompt": "a", "template": {"x": 1}}, "x is for messages"),
    "both names": (
        {"messages": ASK, "template": {"x": 1}, "chat_template_kwargs": {"x": 1}},
        "template and chat_template_kwargs are the same",
    ),
    "no tool": ({"messages": ASK, "tools": [SCHEMA, 1]}, r"tools\[1\] must be .*, got int: 1"),
    "no list of tools": ({"messages": ASK, "tools": add}, r"use tools=\[tool\]"),
    "a schema alone": ({"messages": ASK, "tools": SCHEMA}, r"got dict: .*use tools=\[tool\]"),
    "a function without hints": (
        {"messages": ASK, "tools": [add, lambda x: x]},
        r"tools\[1\] has no schema, .*<lambda>",
    ),
    "a list with a number": (
        {"prompt": ["a", 1]},
        r"prompt\[1\] must be text, got int: 1",
    ),
    "nothing to continue": (
        {"messages": ASK, "continue_final_message": True},
        "the last message is {'role': 'user'",
    ),
}


@pytest.mark.parametrize("name", WRONG)
async def test_wrong_arguments_are_named(client: sglrl.Client, name: str) -> None:
    given, says = WRONG[name]
    with pytest.raises(sglrl.InvalidRequest, match=says):
        await client.generate(**given)
    with pytest.raises(sglrl.InvalidRequest, match=says):
        async for _ in client.stream(**given):
            pass
    with pytest.raises(sglrl.InvalidRequest, match=says):
        async with client.session(**given) as session:
            await session.generate()


async def test_a_template_for_a_model_without_one(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path, 512)
    tokenizer.chat_template = None
    (tmp_path / "chat_template.jinja").unlink()
    tokenizer.save_pretrained(tmp_path)
    async with sglrl.launch(tmp_path, engine="fake", vocab_size=512) as client:
        with pytest.raises(sglrl.InvalidRequest, match="has no chat template"):
            await client.generate(messages=ASK, max_new_tokens=1)
        done = await client.generate(
            messages=ASK, template={"chat_template": TEMPLATE}, max_new_tokens=1
        )
        assert done.prompt_ids.tolist() == expected(client, ASK, chat_template=TEMPLATE)
