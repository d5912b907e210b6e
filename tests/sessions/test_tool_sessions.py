"""Sessions with tools on the real engine, with Qwen3's chat template and a tiny vocabulary."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import runpy
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import anthropic
import openai
import pydantic
import pytest
import pytest_asyncio
from engine.reference import Reference
from readme import DOCS

import sglrl
from sessions.families import FAMILIES, family_template, family_tokenizer
from sglrl.gateway.serve import serve
from sglrl.launching.tiny_model import make_model

ASK = [{"role": "user", "content": "What is 2 + 3?"}]


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first number
        b: the second number
    """
    return a + b


CALL = r'<tool_call>\n\{"name": "add", "arguments": \{"a": [0-9], "b": [0-9]\}\}\n</tool_call>'


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def tools_client(models: Path) -> AsyncIterator[sglrl.Client]:
    folder = make_model(models / "qwen3-tools")
    family_tokenizer(folder, FAMILIES["qwen3"])
    async with sglrl.launch(folder, device="cpu") as client:
        yield client


def written_as(client: sglrl.Client, pattern: str) -> dict[str, Any]:
    """Return sampling options for text of a pattern, whose tags are single tokens."""
    tags = ["<tool_call>", "</tool_call>", "<think>", "</think>", "<|im_end|>"]
    bias = {client.tokenizer.convert_tokens_to_ids(tag): 100.0 for tag in tags}
    return {"regex": pattern, "logit_bias": bias, "max_new_tokens": 200}


def rendered(client: sglrl.Client, messages: list[dict[str, Any]]) -> str:
    text: str = client.tokenizer.apply_chat_template(
        messages, tools=[add], tokenize=False, add_generation_prompt=True
    )
    return text


def text_of(client: sglrl.Client, turn: sglrl.Completion) -> str:
    text: str = client.tokenizer.decode(turn.prompt_ids.tolist())
    return text


@pytest.mark.asyncio(loop_scope="session")
async def test_calls_and_results(tools_client: sglrl.Client) -> None:
    client = tools_client
    two = written_as(client, f"{CALL}\n{CALL}")
    messages: list[dict[str, Any]] = list(ASK)
    async with client.session(messages=ASK, tools=[add]) as session:
        before: list[int] = []
        for number in range(4):
            turn = await session.generate(**two)
            assert turn.prompt_ids[: len(before)].tolist() == before
            assert text_of(client, turn) == rendered(client, messages)
            assert turn.finish_reason == "stop"
            message = turn.message
            assert (message.role, message.content, message.reasoning_content) == (
                "assistant", "", None
            )  # fmt: skip
            assert [call.id for call in turn.tool_calls] == [f"call_{number}_{i}" for i in (0, 1)]
            results: list[dict[str, Any]] = []
            for call in turn.tool_calls:
                assert (call.name, call.error) == ("add", "")
                assert call.arguments is not None
                assert call.arguments.keys() == {"a", "b"}
                result = str(add(**call.arguments))
                results.append({"role": "tool", "tool_call_id": call.id, "content": result})
            session.observe(results)
            messages += [message.as_dict(), *results]
            before = session.ids.tolist()
        whole = session.trajectory()
    assert whole.branches == ()
    assert whole.messages == messages[:-2]
    assert len(whole.turns) == 4


@pytest.mark.asyncio(loop_scope="session")
async def test_a_new_question_after_reasoning_branches(tools_client: sglrl.Client) -> None:
    """Qwen3's template removes the reasoning of earlier turns when the user asks again."""
    client = tools_client
    thinks = written_as(client, r"<think>\n[a-z]{9}\n</think>\n\n[a-z]{5}")
    thinks_and_calls = written_as(client, rf"<think>\n[a-z]{{9}}\n</think>\n\n{CALL}")
    async with client.session(messages=ASK, tools=[add]) as session:
        first = await session.generate(**thinks_and_calls)
        assert first.message.reasoning_content is not None
        assert len(first.message.reasoning_content.strip()) == 9
        (call,) = first.tool_calls
        session.observe({"role": "tool", "tool_call_id": call.id, "content": "5"})
        second = await session.generate(**thinks)
        # The reasoning before a call stays.
        assert second.prompt_ids[: len(first.prompt_ids)].tolist() == first.prompt_ids.tolist()
        assert first.message.reasoning_content in text_of(client, second)
        assert len(second.message.content.strip()) == 5
        session.observe({"role": "user", "content": "And now?"})
        third = await session.generate(**thinks)
        conversation = session.trajectory().messages
        leaves = session.trajectories()
    assert conversation is not None
    assert text_of(client, third) == rendered(client, conversation[:-1])
    for turn in (first, second):
        assert turn.message.reasoning_content is not None
        assert turn.message.reasoning_content.strip() not in text_of(client, third)
    sampled = [leaf.response_ids[leaf.loss_mask].tolist() for leaf in leaves]
    assert sampled == [
        [*first.output_ids.tolist(), *second.output_ids.tolist()],
        third.output_ids.tolist(),
    ]


@pytest.mark.parametrize(
    ("pattern", "error"),
    [
        (r'<tool_call>\n\{"name": "add", "arguments": [a-z]{3}\}\n</tool_call>', "not JSON"),
        (r'<tool_call>\n\{"arguments": \{\}\}\n</tool_call>', "names no tool"),
        (r'<tool_call>\n\{"name": "add"', "not JSON"),
        (r'<tool_call>\n\{"name": "add", "arguments": "[a-z]{3}"\}\n</tool_call>', "not"),
    ],
)
@pytest.mark.asyncio(loop_scope="session")
async def test_a_malformed_call_is_data(
    tools_client: sglrl.Client, pattern: str, error: str
) -> None:
    client = tools_client
    async with client.session(messages=ASK, tools=[add]) as session:
        turn = await session.generate(**written_as(client, f"[a-z]{{3}}\n{pattern}\n{CALL}"))
        wrong, *others = turn.tool_calls
        assert error in wrong.error
        assert wrong.arguments is None
        assert wrong.raw
        if others:
            assert [call.error for call in others] == [""]
        session.observe({"role": "tool", "content": "That is no call."})
        before = session.ids.tolist()
        following = await session.generate(max_new_tokens=2)
        assert following.prompt_ids[: len(before)].tolist() == before


@pytest.mark.asyncio(loop_scope="session")
async def test_which_renderer(tools_client: sglrl.Client) -> None:
    client = tools_client
    call = written_as(client, CALL)
    for renderer, calls in ((None, 1), ("qwen3", 1), ("template", 0)):
        async with client.session(messages=ASK, tools=[add], renderer=renderer) as session:
            turn = await session.generate(**call)
            assert len(turn.tool_calls) == calls
            if not calls:
                assert "<tool_call>" in turn.message.content
                session.observe({"role": "user", "content": "And?"})
                before = session.ids.tolist()
                turn = await session.generate(max_new_tokens=1)
                assert turn.prompt_ids[: len(before)].tolist() == before
    for name, why in (
        ("qwen4", "there is no renderer 'qwen4'; known: deepseek-r1, "),
        ("glm-4.5", "the renderer 'glm-4.5' does not fit this model"),
        ("qwen3.5", "renderer='qwen3.5' does not fit: token"),
    ):
        with pytest.raises(sglrl.InvalidRequest, match=why):
            await client.session(messages=ASK, tools=[add], renderer=name).generate()
    for arguments, why in (
        ({"prompt": "x"}, "none are given"),
        ({"messages": ASK, "allow_rewrite": True}, "with allow_rewrite, none is used"),
    ):
        with pytest.raises(sglrl.InvalidRequest, match=why):
            client.session(renderer="qwen3", **arguments)  # type: ignore[arg-type]


@pytest.mark.asyncio(loop_scope="session")
async def test_thinking_disabled(tools_client: sglrl.Client) -> None:
    """Qwen3's own template rewrites the turns of such a conversation; the renderer does not."""
    client = tools_client
    async with client.session(
        messages=ASK, template={"enable_thinking": False}, renderer="qwen3"
    ) as session:
        for _ in range(3):
            turn = await session.generate(regex="[a-z]{5}", max_new_tokens=20)
            assert len(turn.message.content) == 5
            session.observe({"role": "user", "content": "And now?"})
        assert len(session.trajectories()) == 1


@pytest.mark.asyncio(loop_scope="session")
async def test_messages_of_single_calls(tools_client: sglrl.Client) -> None:
    client = tools_client
    call = written_as(client, CALL)
    one = await client.generate(messages=ASK, tools=[add], **call)
    (found,) = one.tool_calls
    assert (found.id, found.name, found.error) == ("call_0_0", "add", "")
    both = await client.generate(messages=[ASK, ASK], tools=[add], n=2, **call)
    ids = [c.tool_calls[0].id for group in both for c in group]
    assert ids == ["call_0_0", "call_1_0", "call_2_0", "call_3_0"]
    thinks = written_as(client, r"<think>\n[a-z]{9}\n</think>\n\n[a-z]{5}")
    named = await client.generate(messages=ASK, renderer="qwen3", **thinks)
    assert named.message.reasoning_content is not None
    plain = await client.generate(messages=ASK, **thinks)
    assert plain.message.reasoning_content is None
    for arguments, why in (
        ({"prompt": "x", "renderer": "qwen3"}, "renderer is for messages, and none are given"),
        ({"messages": ASK, "renderer": "qwen3.5"}, "renderer='qwen3.5' does not fit: token"),
    ):
        with pytest.raises(sglrl.InvalidRequest, match=why):
            await client.generate(**arguments)


def digit_tool(name: str) -> dict[str, Any]:
    """Return the schema of a tool whose arguments are short."""
    digit = {"type": "integer", "minimum": 0, "maximum": 9}
    parameters = {"type": "object", "properties": {"a": digit, "b": digit}, "required": ["a", "b"]}
    return {
        "type": "function",
        "function": {"name": name, "description": "", "parameters": parameters},
    }


@pytest.mark.asyncio(loop_scope="session")
async def test_turns_that_must_call(tools_client: sglrl.Client) -> None:
    """The model is random: without a grammar it never calls."""
    client = tools_client
    tools = [digit_tool("add"), digit_tool("multiply")]
    options: dict[str, Any] = {"max_new_tokens": 400, "seed": 3}
    # The model ends its thoughts, and its turn, as soon as the grammar allows it.
    ends = [client.tokenizer.convert_tokens_to_ids(token) for token in ("</think>", "<|im_end|>")]
    options["logit_bias"] = dict.fromkeys(ends, 50.0)
    called = []
    for number in range(8):
        for thinks in (True, False):
            async with client.session(
                messages=ASK, tools=tools, template={"enable_thinking": thinks}, **options
            ) as session:
                turn = await session.generate(tool_choice="required", seed=number)
                (call,) = turn.tool_calls
                assert call.error == ""
                assert call.arguments is not None
                assert call.arguments.keys() == {"a", "b"}
                assert all(0 <= value <= 9 for value in call.arguments.values())
                assert turn.text.startswith("<think>\n" if thinks else "<tool_call>\n")
                assert turn.finish_reason == "stop"
                called.append(call.name)
                session.observe({"role": "tool", "tool_call_id": call.id, "content": "5"})
                openai = {"type": "function", "function": {"name": "multiply"}}
                turn = await session.generate(tool_choice=openai)
                assert [call.name for call in turn.tool_calls] == ["multiply"]
                session.observe({"role": "tool", "content": "5"})
                assert (await session.generate(tool_choice="auto")).tool_calls == ()
    assert set(called) == {"add", "multiply"}
    # Several calls: the end of a turn is unlikely.
    options["logit_bias"] = {ends[0]: 50.0, ends[1]: -5.0}
    several = await client.generate(
        messages=[ASK, ASK], tools=tools, tool_choice="required", **options
    )
    for made in several:
        *calls, last = made.tool_calls
        assert len(calls) > 2
        assert [call.error for call in calls] == [""] * len(calls)
        assert made.finish_reason == "stop" or last.error
    made = await client.generate(messages=ASK, tools=tools, tool_choice="add", **options)
    (one,) = made.tool_calls
    assert one.name == "add"
    async with client.session(
        messages=ASK, tools=tools, tool_choice="add", template={"enable_thinking": False}, **options
    ) as session:
        turn = await session.run_tools({"add": add}, max_turns=3)
        assert [[call.name for call in turn.tool_calls] for turn in session.turns] == [["add"]] * 3
        rewritten = [*ASK, {"role": "assistant", "content": "Hm."}, *ASK]
        session.rewrite(rewritten)
        assert [call.name for call in (await session.generate()).tool_calls] == ["add"]
    async with client.session(messages=ASK, tools=tools, **options) as session:
        session.rewrite(rewritten)
        assert len((await session.generate(tool_choice="add")).tool_calls) == 1


@pytest.mark.asyncio(loop_scope="session")
async def test_wrong_choices(tools_client: sglrl.Client) -> None:
    client = tools_client
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"tool_choice": "sub"}, "must be one of 'auto', 'required', 'add', got 'sub'"),
        ({"tool_choice": "none"}, "must be one of 'auto'"),
        ({"tool_choice": {"type": "function"}}, "must be one of 'auto'"),
        ({"tool_choice": 3}, "must be one of 'auto'"),
        ({"tool_choice": "required", "tools": None}, r"needs tools=\[...\]"),
        ({"tool_choice": "add", "json_schema": {}}, "a grammar too: omit json_schema"),
        ({"tool_choice": "add", "renderer": "template"}, "no renderer fits"),
    ]
    for given, why in wrong:
        arguments = {"messages": ASK, "tools": [add], "max_new_tokens": 2, **given}
        with pytest.raises(sglrl.InvalidRequest, match=why):
            await client.generate(**arguments)
        with pytest.raises(sglrl.InvalidRequest, match=why):
            await client.session(**arguments).generate()
    async with client.session(messages=ASK, tools=[add], max_new_tokens=2) as session:
        with pytest.raises(sglrl.InvalidRequest, match="must be one of"):
            await session.generate(tool_choice="sub")
        # The session can go on.
        await session.generate(tool_choice="required")
    with pytest.raises(sglrl.InvalidRequest, match="tool_choice is for messages, and none are"):
        await client.generate(input_ids=[3], tool_choice="required")


def test_the_page_runs(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_model(models / "qwen3-page")
    family_tokenizer(folder, FAMILIES["qwen3"])
    code, *_ = re.findall(r"```python\n(.*?)```", (DOCS / "tools.md").read_text(), re.DOTALL)
    for before, after in {
        '"Qwen/Qwen3-0.6B"': repr(str(folder)),
        "launch(MODEL)": 'launch(MODEL, device="cpu")',
        "max_new_tokens=512": "max_new_tokens=8",
    }.items():
        assert code.count(before) == 1
        code = code.replace(before, after)
    script = folder / "page.py"
    script.write_text(code)
    runpy.run_path(str(script))
    # The random model calls no tool.
    assert capsys.readouterr().out.startswith("[0. 0. 0. 0.] ")


@pytest.mark.asyncio(loop_scope="session")
async def test_a_rollout_with_tools(tools_client: sglrl.Client) -> None:
    client = tools_client
    call = written_as(client, CALL)

    async def agent(session: sglrl.Session, item: dict[str, Any]) -> float:
        total = 0
        for _ in range(3):
            turn = await session.generate(**call)
            results = [
                {"role": "tool", "tool_call_id": c.id, "content": str(add(**(c.arguments or {})))}
                for c in turn.tool_calls
            ]
            total += len(results)
            session.observe(results)
        return total

    async with sglrl.rollout(
        client, agent, [{"messages": ASK}] * 4, group_size=2, tools=[add]
    ) as run:
        groups = [group async for group in run]
    assert [group.rewards.tolist() for group in groups] == [[3, 3]] * 4


@pytest.mark.asyncio(loop_scope="session")
async def test_updates_and_aborts_within_turns_that_call(models: Path) -> None:
    """Ids, spans of versions and parsed calls stay exact, and the thought of the turn as well."""
    folder = make_model(models / "qwen3-updates")
    family_tokenizer(folder, FAMILIES["qwen3"])
    policies = [
        Reference(make_model(models / f"qwen3-policy-{seed}", seed=seed)) for seed in (1, 2)
    ]
    async with sglrl.launch(folder, device="cpu", replicas=2) as client:
        thinks = written_as(client, rf"<think>\n[a-z]{{40,90}}\n</think>\n\n{CALL}")
        sessions: list[sglrl.Session] = []

        async def agent(number: int) -> None:
            async with client.session(messages=ASK, tools=[add], seed=number) as session:
                sessions.append(session)
                await session.run_tools([add], max_turns=4, **thinks)

        playing = asyncio.gather(*(agent(number) for number in range(12)))
        inflight = itertools.cycle(["continue", "abort"])
        while not playing.done():
            await client.update_weights(
                policies[client.weight_version % 2].model, inflight=next(inflight)
            )
            await client.abort()
        await playing
        spans = 0
        for session in sessions:
            before: list[int] = []
            for turn in session.turns:
                prompt, sampled = turn.prompt_ids.tolist(), turn.output_ids.tolist()
                assert prompt[: len(before)] == before
                before = prompt + sampled
                text = client.tokenizer.decode(sampled)
                said = re.fullmatch(rf"<think>\n([a-z]+)\n</think>\n\n({CALL})<\|im_end\|>", text)
                assert said is not None
                assert (turn.message.reasoning_content or "").strip() == said[1]
                (call,) = turn.tool_calls
                assert call.arguments == json.loads(said[2][12:-13])["arguments"]
                edges = [span.start for span in turn.versions] + [len(sampled)]
                assert edges[0] == 0
                assert edges == sorted(set(edges))
                assert [span.stop for span in turn.versions] == edges[1:]
                versions = [span.version for span in turn.versions]
                assert versions == sorted(set(versions))
                spans += len(versions) > 1
            messages = session.trajectory().messages
            assert messages is not None
            assert text_of(client, session.turns[-1]) == rendered(client, messages[:-1])
            assert session.trajectory().branches == ()
        assert spans


# --- grammars after the reasoning -----------------------------------------------------------------


class Answer(pydantic.BaseModel):
    digit: Literal[1, 2, 3]


SCHEMA = Answer.model_json_schema()
TEMPLATE = family_template(FAMILIES["qwen3.5"])
"""It opens the reasoning in the prompt."""


@pytest.mark.asyncio(loop_scope="session")
async def test_grammars_after_the_reasoning(tools_client: sglrl.Client) -> None:
    client, template = tools_client, {"chat_template": TEMPLATE}
    bias = {client.tokenizer.convert_tokens_to_ids("</think>"): 6.0}
    pattern = r'\{ ?"digit": ?[123]\}'
    grammars: list[dict[str, Any]] = [
        {"json_schema": SCHEMA},
        {"regex": pattern},
        {"ebnf": r'root ::= "{\"digit\": " [123] "}"'},
        {"structural_tag": {"format": {"type": "regex", "pattern": pattern}}},
    ]
    for values in grammars:
        values |= {"logit_bias": bias, "max_new_tokens": 200, "seed": 5}
        turns = [await client.generate(messages=ASK, template=template, **values)]
        async with client.session(messages=ASK, template=template) as session:
            turns.append(await session.generate(**values))
            session.observe([{"role": "user", "content": "And then?"}])
            turns.append(await session.generate(**values))
        for turn in turns:
            assert turn.finish_reason == "stop"
            assert turn.message.reasoning_content is not None
            Answer.model_validate_json(turn.message.content)
    # The turn ends within the reasoning.
    values = {"json_schema": SCHEMA, "max_new_tokens": 20}
    values["logit_bias"] = dict.fromkeys(bias, -100.0)
    turn = await client.generate(messages=ASK, template=template, **values)
    assert (turn.finish_reason, turn.message.content) == ("length", "")
    # Qwen3's own template lets the model decide. It is asked not to reason here.
    values = {"json_schema": SCHEMA, "template": {"enable_thinking": False}}
    turn = await client.generate(messages=ASK, max_new_tokens=200, **values)
    assert turn.message.reasoning_content is None
    Answer.model_validate_json(turn.text)


@pytest.mark.asyncio(loop_scope="session")
async def test_parsed_answers_after_the_reasoning(tools_client: sglrl.Client) -> None:
    """The ``parse`` methods of clients get the JSON, and never the reasoning."""
    bias = {str(tools_client.tokenizer.convert_tokens_to_ids("</think>")): 6.0}
    more: dict[str, Any] = {"chat_template_kwargs": {"chat_template": TEMPLATE}, "seed": 3}
    more["logit_bias"] = bias
    async with serve(tools_client, name="policy") as gateway:
        async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="x") as agent:
            chat = await agent.chat.completions.parse(
                model="policy", messages=ASK, response_format=Answer, max_tokens=200,
                extra_body=more,
            )  # fmt: skip
            assert chat.choices[0].message.parsed is not None
            response = await agent.responses.parse(
                model="policy", input="Hi", text_format=Answer, max_output_tokens=200,
                extra_body=more,
            )  # fmt: skip
            assert response.output_parsed is not None
            assert [item.type for item in response.output] == ["reasoning", "message"]
        async with anthropic.AsyncAnthropic(base_url=gateway.url, api_key="x") as claude:
            message = await claude.messages.create(
                model="policy", messages=ASK, max_tokens=200, extra_body={
                    **more, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}
                },
            )  # fmt: skip
            assert [block.type for block in message.content] == ["thinking", "text"]
            Answer.model_validate_json(message.content[-1].text)
