"""The prompt of a turn after a message of the user begins with exactly the sampled tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import sglrl
from sglrl.inference.chat_templates import render_conversation
from sglrl.inference.renderer import find_renderer
from sglrl.inference.tokens import TokenizerBox
from sglrl.sessions.observations import Dialogue, encode_observations, parsed
from sglrl.sessions.options import SessionOptions

from .families import FAMILIES, Family, family_tokenizer

ASK = [{"role": "user", "content": "What is 1 + 2?"}]
MORE = {"role": "user", "content": "Go on."}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        },
    }
]


PIECES = [
    "Hello", " ", "\n", "\n\n", "\t", "\u00a0", "\u3000", "é", "🙂", "日本", "{", "}", '"',
    "\\u00e9", "<", ">", "<b>", "<tool_call", "tool_call>", '{"name": "add"', "null",
    '"arguments": {"a": 1}}',
]  # fmt: skip


class Case:
    """A family with its tokenizer, with or without its renderer."""

    def __init__(self, name: str, folder: Path, has_renderer: bool, **template: Any) -> None:
        self.family: Family = FAMILIES[name]
        self.tokenizer = family_tokenizer(folder, self.family)
        self.box = TokenizerBox(str(folder))
        self.template: dict[str, Any] = {"tools": TOOLS, **template}
        if self.family.template == "llama3_2":
            self.template["date_string"] = "26 Jul 2024"
        self.has_renderer = has_renderer
        renderer = find_renderer(None, self.box, self.template) if has_renderer else None
        assert (renderer is not None) == has_renderer
        self.spec: Any = SimpleNamespace(
            requests=SimpleNamespace(
                box=self.box, decode=self.box.decode, vocab_size=len(self.tokenizer)
            ),
            options=SessionOptions(),
            renderer=renderer,
            template=self.template,
            render=lambda messages: render_conversation(self.box, messages, self.template),
        )
        self.prompt = self.encode(self.spec.render(ASK))

    def encode(self, text: str) -> list[int]:
        found: list[int] = self.box.encode_rendered([text])[0]
        return found

    @property
    def thoughts(self) -> tuple[str, ...]:
        return ("<|channel>", "<channel|>") if self.family.template == "gemma4_v5" else THOUGHTS

    def thinks(self, text: str) -> bool:
        """Return whether a turn has, or continues, what a template may take for reasoning."""
        prompt = self.box.decode(self.prompt, False)
        # GLM's template writes an empty thought into each earlier answer.
        opened = prompt.rstrip().endswith("<think>") or self.family.template == "glm4moe"
        return opened or any(mark in text for mark in self.thoughts)

    def next_prompt(self, sampled: Sequence[int], new: Sequence[Any]) -> list[int]:
        tokens = np.array([*self.prompt, *sampled], "<i4").tobytes()
        dialogue = Dialogue(ASK, answer_at=4 * len(self.prompt))
        renderer = self.spec.renderer
        said = parsed(renderer, tokens, dialogue, 0) if renderer else None
        ended = bool(sampled) and sampled[-1] == self.tokenizer.eos_token_id
        end = sampled[-1] if ended else None
        found, _ = encode_observations(self.spec, [list(new)], tokens, dialogue, end, said)
        ids: list[int] = np.frombuffer(found, "<i4").tolist()
        return ids


THOUGHTS = ("<think>", "</think>")


CASES = [*[(name, True) for name in FAMILIES], ("qwen3", False), ("gemma4", False)]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param[0], tmp_path_factory.mktemp("tokenizer"), request.param[1])


def after_the_answer(case: Case, new: Sequence[Any]) -> str:
    """Return what the template writes after an answer."""
    whole = case.spec.render([*ASK, {"role": "assistant", "content": "XYZ"}, *new])
    return str(whole.rpartition("XYZ")[2])


@given(data=st.data())
@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_text(case: Case, data: st.DataObject) -> None:
    marks = [t for t in case.family.tokens.split() if "call" in t or "arg_" in t]
    pieces = st.one_of(st.sampled_from([*PIECES, *marks]), st.text(max_size=5))
    parts = data.draw(st.lists(pieces, max_size=8))
    # Each part is tokenized alone, so these are often not the tokenizer's own tokens of the text.
    sampled = [
        id_ for part in parts if part.isprintable() or part.isspace() for id_ in case.encode(part)
    ]
    if data.draw(st.booleans()):
        sampled.append(case.tokenizer.eos_token_id)
    text = case.box.decode(sampled, False)
    new = data.draw(st.sampled_from([[MORE], [MORE, MORE]]))
    found = case.next_prompt(sampled, new)
    before = [*case.prompt, *sampled]
    if found[: len(before)] != before:
        assert case.thinks(text), text
        return
    rest = case.box.decode(found[len(before) :], False)
    expected = after_the_answer(case, new)
    # The end token may be sampled already, and white space before it is the template's.
    assert rest.endswith(expected[expected.index("Go on.") :]), (rest, expected)


@pytest.mark.parametrize("text", ["Hello ", "Hello\n", "\n Hello \n", "", " ", "\u3000é\u00a0"])
def test_white_space(case: Case, text: str) -> None:
    if case.thinks(text):
        # The turn is reasoning. The template may remove it, and then another branch begins.
        found = case.next_prompt(case.encode(text), [MORE])
        end = after_the_answer(case, [MORE])
        assert case.box.decode(found, False).endswith(end[end.index("Go on.") :])
        return
    for ended in ([], [case.tokenizer.eos_token_id]):
        sampled = [*case.encode(text), *ended]
        found = case.next_prompt(sampled, [MORE])
        before = [*case.prompt, *sampled]
        assert found[: len(before)] == before
        rest = case.box.decode(found[len(before) :], False)
        end = case.tokenizer.eos_token
        expected = after_the_answer(case, [MORE])
        assert rest.removeprefix(end) == expected.removeprefix(end)


def only(name: str, tmp_path: Path, **template: Any) -> Case:
    return Case(name, tmp_path, True, **template)


RESULT = {"role": "tool", "tool_call_id": "call_0_0", "name": "add", "content": "3"}


@pytest.mark.parametrize(
    "text",
    [
        'Hello <tool_call>\n{"arguments":{"a":  1.0},\n "name":"add"}</tool_call>',
        'Hello <tool_call> {"name": "add", "arguments": {"a": "\\ud83d"}}\n</tool_call> and so on ',
        'Hello \n<tool_call>\n{"name": "add", "argum',
        "Hello <tool_call>\n{bad}\n</tool_call>\n and so on ",
        "</tool_call> <tool_response> x",
        # Only the part before an end token is parsed.
        "Hello<|im_end|> and so on",
    ],
)
@pytest.mark.parametrize("new", [[MORE], [RESULT, MORE]])
def test_calls(tmp_path: Path, text: str, new: list[Any]) -> None:
    """White space, another order of the fields, escapes and unfinished calls are kept."""
    case = only("qwen3", tmp_path)
    for end in ([], [case.tokenizer.eos_token_id]):
        sampled = [*case.encode(text), *end]
        found = case.next_prompt(sampled, new)
        before = [*case.prompt, *sampled]
        assert found[: len(before)] == before
        rest = case.box.decode(found[len(before) :], False).removeprefix("<|im_end|>")
        expected = after_the_answer(case, new).removeprefix("<|im_end|>")
        assert rest == expected


def test_thoughts(tmp_path: Path) -> None:
    """Thoughts that the template removes are a branch, and others are kept."""
    thought = "Hm.\n</think>\n\nHello "
    for name, keeps, template in (
        ("qwen3", False, {}),
        ("qwen3.5", False, {}),
        ("qwen3.6", False, {}),
        ("qwen3.6", True, {"preserve_thinking": True}),
        ("qwen3.8", True, {}),
        ("nemotron-3", False, {}),
    ):
        case = only(name, tmp_path, **template)
        begin = "<think>\n" if name == "qwen3" else ""
        sampled = case.encode(begin + thought)
        found = case.next_prompt(sampled, [MORE])
        before = [*case.prompt, *sampled]
        assert (found[: len(before)] == before) == keeps, name
        if not keeps:
            said = {"role": "assistant", "content": "Hello", "reasoning_content": "Hm."}
            assert case.box.decode(found, False) == case.spec.render([*ASK, said, MORE])
        # Nothing is removed between the calls of an answer.
        assert case.next_prompt(sampled, [RESULT])[: len(before)] == before


def test_a_lone_surrogate_in_a_branch(tmp_path: Path) -> None:
    """The template removes the thought, so the call is rendered again, with another character."""
    case = only("qwen3", tmp_path)
    call = (
        '<tool_call>\n{"name": "add", "arguments": {"a": "\\ud83d \\ud83d\\ude00"}}\n</tool_call>'
    )
    sampled = case.encode(f"<think>\nHm.\n</think>\n\n{call}")
    said = case.spec.renderer.parse(case.prompt, sampled, 0)
    assert said.tool_calls[0].arguments == {"a": "\ud83d 😀"}
    found = case.next_prompt(sampled, [RESULT, MORE])
    assert '{"a": "\ufffd 😀"}' in case.box.decode(found, False)


MALFORMED = {
    "qwen3": ("Hello <tool_call>\n{bad}\n</tool_call>\n and so on ", ""),
    "qwen3.5": ("Hm.\n</think>\n\nHello \n<tool_call>\n<function=ad", "Hm.\n</think>\n\n"),
    "glm-4.5": ("Hm.</think>\nHello <tool_call>sub\n</tool_call> x", "Hm.</think>\n"),
    "gemma4": ("Hello <|tool_call>call:add{a:", ""),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_the_text_of_a_malformed_call_is_content(tmp_path: Path, name: str) -> None:
    case = only(name, tmp_path)
    text, reasoning = MALFORMED[name]
    said = case.spec.renderer.parse(case.prompt, case.encode(text), 0)
    assert [bool(call.error) for call in said.tool_calls] == [True]
    assert said.as_dict()["content"].lstrip() == text.removeprefix(reasoning)
    assert "tool_calls" not in said.as_dict()


def test_the_text_between_valid_calls(tmp_path: Path) -> None:
    case = only("qwen3", tmp_path)
    good = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    text = f"So {good} then <tool_call>bad</tool_call>\n{good} and <tool_call>"
    text = f"<think>\nHm.\n</think>\n\n{text}"
    said = case.spec.renderer.parse(case.prompt, case.encode(text), 0)
    assert [bool(call.error) for call in said.tool_calls] == [False, True, False, True]
    message = said.as_dict()
    assert message["content"] == "So  then <tool_call>bad</tool_call>\n and <tool_call>"
    assert len(message["tool_calls"]) == 2
    assert said.content == "So"


@pytest.mark.asyncio
async def test_rewrite(tmp_path: Path) -> None:
    """The answer is found as it was parsed, as it was sampled, and stripped."""
    family_tokenizer(tmp_path, FAMILIES["qwen3"])
    ask = [{"role": "user", "content": "Go on.\n"}]
    async with (
        sglrl.launch(str(tmp_path), engine="fake") as client,
        client.session(messages=ask) as session,
    ):
        # The engine repeats the prompt, here up to the second line break.
        turn = await session.generate(max_new_tokens=9)
        ids = session.ids.tolist()
        text = client.tokenizer.decode(turn.output_ids, skip_special_tokens=False)
        assert text == "<|im_start|>user\nGo on.\n"
        said = turn.message.as_dict()
        assert said["content"] == text.strip()
        for answer in (said, {**said, "content": text}):
            session.rewrite([*ask, answer, MORE])
            found = await session.generate(max_new_tokens=1)
            assert found.prompt_ids[: len(ids)].tolist() == ids
