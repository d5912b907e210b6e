"""A grammar begins after the reasoning of a turn, and allows calls of tools beside the JSON."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import sglrl
from sglrl.inference.chat_templates import render_conversation
from sglrl.inference.renderer import Renderer, find_renderer
from sglrl.inference.sampling import SamplingParams
from sglrl.inference.tokens import TokenizerBox
from sglrl.inference.turn_grammar import turn_format

from .families import FAMILIES, family_tokenizer
from .grammars import Allowed

ASK = [{"role": "user", "content": "Hi"}]
SCHEMA = {
    "type": "object",
    "properties": {"answer": {"type": "integer"}},
    "required": ["answer"],
    "additionalProperties": False,
}
ANSWER = '{"answer": 5}'
CHOICE = {
    "type": "structural_tag",
    "format": {"type": "or", "elements": [{"type": "const_string", "value": ANSWER}]},
}
LEGACY = {
    "type": "structural_tag",
    "structures": [{"begin": '{"answer": ', "schema": {"type": "integer"}, "end": "}"}],
    "triggers": ['{"answer": '],
    "at_least_one": True,
}
GRAMMARS: dict[str, dict[str, Any]] = {
    "json_schema": {"json_schema": SCHEMA},
    "json_object": {"json_schema": {"type": "object"}},
    "text": {"json_schema": json.dumps(SCHEMA)},
    "regex": {"regex": r'\{"answer": [0-9]\}'},
    "ebnf": {"ebnf": 'root ::= "{" body "}"\nbody ::= "\\"answer\\": " [0-9]'},
    "choice": {"structural_tag": CHOICE},
    "legacy tag": {"structural_tag": json.dumps(LEGACY)},
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "look_up", "description": "Look it up.", "parameters": SCHEMA},
    }
]
NEVER = ("llama-3",)
"""Families without reasoning."""


class Turn:
    """A turn of a family after a prompt."""

    def __init__(self, family: str, folder: Path, options: dict[str, Any]) -> None:
        family_tokenizer(folder, FAMILIES[family])
        box = TokenizerBox(str(folder))
        if family == "llama-3":
            options = {**options, "date_string": "26 Jul 2024"}
        found = find_renderer(FAMILIES[family].renderers[0], box, options)
        assert found is not None
        self.renderer: Renderer = found
        (self.prompt,) = box.encode_rendered([render_conversation(box, ASK, options)])

    def allowed(self, choice: Any = "auto", **grammar: Any) -> Allowed | None:
        form = turn_format(self.renderer, self.prompt, choice, SamplingParams(**grammar))
        return None if form is None else Allowed(self.renderer, form)

    def read(self, text: str) -> sglrl.AssistantMessage:
        return self.renderer.parse(self.prompt, self.renderer.encode(text), 0)


@pytest.mark.parametrize("grammar", GRAMMARS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_grammar_begins_after_the_reasoning(family: str, grammar: str, tmp_path: Path) -> None:
    turn = Turn(family, tmp_path, {})
    allowed = turn.allowed(**GRAMMARS[grammar])
    if family in NEVER:
        assert allowed is None
        return
    assert allowed is not None
    opening, closing = turn.renderer.example(1).split("Hm.")  # type: ignore[union-attr]
    closing = closing[: closing.index(">") + 1].strip()
    for thought in ("Hm.", '{"a": 1} é <b>\n', ANSWER):
        for begin in {opening, opening.strip()}:
            text = f"{begin}{thought}{closing}{ANSWER}"
            assert allowed(text)
            said = turn.read(text)
            assert said.content == ANSWER
            assert thought.strip() in (said.reasoning_content or "")
            # An older tag allows text after it.
            assert allowed(f"{text}x") == (grammar == "legacy tag")
        # The turn cannot end within the reasoning.
        assert allowed.begins(f"{opening}{thought}")
        assert not allowed(f"{opening}{thought}")
        assert not allowed(f"{opening}{thought}{closing}")
    # Without a thought, the JSON is allowed only if it is read as content.
    assert allowed(ANSWER) == (turn.read(ANSWER).content == ANSWER)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in NEVER])
def test_white_space_after_the_reasoning(family: str, tmp_path: Path) -> None:
    """The model may write what the template writes between reasoning and content."""
    turn = Turn(family, tmp_path, {})
    begin = turn.prompt
    whole = turn.renderer._renderer.render_ids(
        [*ASK, {"role": "assistant", "reasoning_content": "Hm.", "content": ANSWER}]
    )
    assert whole[: len(begin)] == begin or family == "gemma4"
    written = turn.renderer.decode(whole[len(begin) :])
    written = written[: written.index(ANSWER) + len(ANSWER)]
    allowed = turn.allowed(json_schema=SCHEMA)
    assert allowed is not None
    if turn.read(written).content == ANSWER and "Hm." in written:
        assert allowed(written)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_that_shall_not_reason(family: str, tmp_path: Path) -> None:
    turn = Turn(family, tmp_path, {"enable_thinking": False})
    if family == "gemma4":
        # Its prompt is the same, so the model decides.
        assert turn.allowed(json_schema=SCHEMA) is not None
    else:
        assert turn.allowed(json_schema=SCHEMA) is None


@pytest.mark.parametrize("family", ["qwen3", "qwen3.5"])
def test_a_prompt_within_the_message(family: str, tmp_path: Path) -> None:
    turn = Turn(family, tmp_path, {})
    encode, opened = turn.renderer.encode, "" if family == "qwen3.5" else "<think>\n"
    begun = turn.prompt
    turn.prompt = [*begun, *encode(f"{opened}Let me")]
    allowed = turn.allowed(json_schema=SCHEMA)
    assert allowed is not None
    assert allowed(f" see.</think>{ANSWER}")
    assert not allowed(ANSWER)
    turn.prompt = [*begun, *encode(f"{opened}Hm.</think>\n\nIt is ")]
    assert turn.allowed(json_schema=SCHEMA) is None


def test_a_grammar_of_whole_turns(tmp_path: Path) -> None:
    turn = Turn("qwen3.5", tmp_path, {})
    assert turn.allowed(regex=r"Hm\.</think>[0-9]") is None
    assert turn.allowed(ebnf='root ::= "<tool_call>" [a-z] "</tool_call>"') is None
    assert turn.allowed(json_schema={"const": "</think>"}) is not None


# --- calls or JSON --------------------------------------------------------------------------------


@pytest.mark.parametrize("thinks", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_or_the_json(family: str, thinks: bool, tmp_path: Path) -> None:
    turn = Turn(
        family, tmp_path, {"tools": TOOLS, **({} if thinks else {"enable_thinking": False})}
    )
    if family in ("llama-3", "gemma4"):
        with pytest.raises(sglrl.InvalidRequest, match=f"the renderer '{family}'"):
            turn.allowed(json_schema=SCHEMA)
        return
    allowed = turn.allowed(json_schema=SCHEMA)
    assert allowed is not None
    begin = turn.renderer.example(1)
    assert begin is not None
    begin = begin[: begin.index("</think>") + len("</think>")] if thinks else ""
    assert allowed(begin + ANSWER)
    kinds = set()
    chance = random.Random(5)
    for _ in range(200):
        ids = allowed.walk(chance, begin, 120)
        if ids is None:
            continue
        said = turn.renderer.parse(turn.prompt, ids, 0)
        if said.tool_calls:
            assert said.content == ""
            for call in said.tool_calls:
                assert (call.name, call.error) == ("look_up", "")
                jsonschema.validate(call.arguments, SCHEMA)
        else:
            jsonschema.validate(json.loads(said.content), SCHEMA)
        kinds.add(bool(said.tool_calls))
    assert kinds == {True, False}
    # Other grammars describe the whole turn.
    with_regex = turn.allowed(regex="[0-9]")
    assert with_regex is None or not any(map(with_regex.begins, ["<tool_call>", begin + "<tool_"]))
