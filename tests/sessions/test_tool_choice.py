"""The grammar of turns that must call tools, for ten families of models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import sglrl
from sglrl.inference.renderer import Renderer, find_renderer
from sglrl.inference.sampling import SamplingParams
from sglrl.inference.tokens import TokenizerBox
from sglrl.inference.tool_choice import ToolChoice
from sglrl.inference.turn_grammar import turn_format

from .families import FAMILIES, family_tokenizer
from .grammars import Allowed

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


def accepts(renderer: Renderer, choice: ToolChoice) -> Allowed:
    """Return the turns that a choice allows."""
    prompt = renderer._renderer.render_ids(
        [{"role": "user", "content": "Hi"}], tools=TOOLS, add_generation_prompt=True
    )
    form = turn_format(renderer, prompt, choice, SamplingParams())
    assert form is not None
    return Allowed(renderer, form)


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
    any_tool, named = accepts(renderer, "required"), accepts(renderer, "multiply")
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
        accepts(renderer, "required")
