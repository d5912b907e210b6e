"""The grammar of turns that must call tools, for ten families of models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import xgrammar

import sglrl
from sglrl.inference.renderer import Renderer, find_renderer
from sglrl.inference.tokens import TokenizerBox
from sglrl.inference.tool_choice import ToolChoice, call_grammar

from .families import FAMILIES, family_tokenizer

NUMBERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "", "parameters": NUMBERS}}
    for name in ("add", "multiply")
]


def renderer_of(family: str, folder: Path, options: dict[str, Any]) -> Renderer:
    family_tokenizer(folder, FAMILIES[family])
    found = find_renderer(
        FAMILIES[family].renderers[0], TokenizerBox(str(folder)), {**options, "tools": TOOLS}
    )
    assert found is not None
    return found


class Accepts:
    """Says which texts a grammar allows, with the model's special tokens as single tokens."""

    def __init__(self, renderer: Renderer, choice: ToolChoice) -> None:
        self._tokenizer = renderer._box.tokenizer
        (self._end, *_) = renderer.end_tokens
        info = xgrammar.TokenizerInfo.from_huggingface(
            self._tokenizer, stop_token_ids=renderer.end_tokens
        )
        tag = json.dumps(call_grammar(renderer, choice))
        self._grammar = xgrammar.GrammarCompiler(info).compile_structural_tag(tag)

    def __call__(self, text: str) -> bool:
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        return self.tokens([*ids, self._end])

    def tokens(self, ids: list[int]) -> bool:
        matcher = xgrammar.GrammarMatcher(self._grammar)
        return all(matcher.accept_token(token) for token in ids) and matcher.is_terminated()


@pytest.mark.parametrize("thinks", [True, False])
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "gemma4"])
def test_calls(family: str, thinks: bool, tmp_path: Path) -> None:
    if family == "llama-3" and not thinks:
        options: dict[str, Any] = {"tools_in_user_message": False}
    else:
        options = {} if thinks else {"enable_thinking": False}
    renderer = renderer_of(family, tmp_path, options)
    once, twice = renderer.example(1), renderer.example(2)
    assert once is not None
    assert ("Hm." in once) == (thinks and family != "llama-3")
    any_tool, named = Accepts(renderer, "required"), Accepts(renderer, "multiply")
    assert any_tool(once)
    assert any_tool(once.replace("add", "multiply"))
    assert any_tool(once.replace("Hm.", "I think\n<b>…</b>"))
    assert any_tool(once.replace("1", "-12"))
    assert named(once.replace("add", "multiply"))
    unknown = once.replace("add", "sub")
    for wrong in ("", "5", once[:-3], unknown, once.replace("2", "x"), f"{once}x"):
        assert not any_tool(wrong)
        assert not named(wrong.replace("add", "multiply"))
    assert not named(once)
    assert (twice is None) == (family == "llama-3")
    if twice is not None:
        assert any_tool(twice)
        assert any_tool(twice.replace("add", "multiply", 1))
        assert not named(twice.replace("add", "multiply"))


def test_a_format_without_a_grammar(tmp_path: Path) -> None:
    renderer = renderer_of("gemma4", tmp_path, {})
    with pytest.raises(sglrl.InvalidRequest, match="not possible with the renderer 'gemma4'"):
        call_grammar(renderer, "required")
