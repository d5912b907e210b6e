"""Turns that end after their first call: ``parallel_tool_calls=False``, for families of models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import sglrl
from sglrl.errors import InvalidRequest
from sglrl.inference.renderer import Renderer, find_renderer
from sglrl.inference.tokens import TokenizerBox
from sglrl.inference.turn_grammar import end_of_call

from .families import FAMILIES, family_tokenizer
from .test_tool_choice import TOOLS

ASK: Any = [{"role": "user", "content": "What is 1 + 2?"}]
SEVERAL = [name for name in FAMILIES if name != "llama-3"]
"""The families whose turns may make several calls."""


def renderer_of(family: str, folder: Path) -> tuple[Renderer, Any]:
    tokenizer = family_tokenizer(folder, FAMILIES[family])
    found = find_renderer(
        FAMILIES[family].renderers[0], TokenizerBox(str(folder)), {"tools": TOOLS}
    )
    assert found is not None
    return found, tokenizer


@pytest.mark.parametrize("family", SEVERAL)
def test_the_token_that_ends_a_call(family: str, tmp_path: Path) -> None:
    """Up to this token, a turn of two calls is one call."""
    renderer, tokenizer = renderer_of(family, tmp_path)
    end, two = end_of_call(renderer), renderer.example(2)
    assert end is not None
    assert two is not None
    ids = tokenizer.encode(two, add_special_tokens=False)
    assert ids.count(end) == 2
    prompt = tokenizer.apply_chat_template(
        ASK, tools=TOOLS, add_generation_prompt=True, return_dict=False
    )
    (call,) = renderer.parse(prompt, ids[: ids.index(end) + 1], 0).tool_calls
    assert (call.name, call.arguments, call.error) == ("add", {"a": 1, "b": 2}, "")


def test_a_turn_that_has_one_call_anyway(tmp_path: Path) -> None:
    renderer, _ = renderer_of("llama-3", tmp_path)
    assert end_of_call(renderer) is None


def test_calls_without_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    renderer, _ = renderer_of("qwen3", tmp_path)
    for calls in ("add(a=1, b=2)\nadd(a=1, b=2)", "<tool_call>add 1 2, <tool_call>add 1 2"):
        one = calls[: len(calls) // 2]
        monkeypatch.setattr(renderer, "example", {1: one, 2: calls}.get)
        with pytest.raises(InvalidRequest, match="parallel_tool_calls=false is not possible with"):
            end_of_call(renderer)


@pytest.mark.parametrize("family", ["qwen3", "qwen3.5", "gemma4"])
async def test_a_conversation_goes_on_after_one_call(family: str, tmp_path: Path) -> None:
    """The next prompt has the sampled tokens, and the end of the turn that was not sampled."""
    renderer, tokenizer = renderer_of(family, tmp_path)
    two = tokenizer.encode(renderer.example(2), add_special_tokens=False)
    end = end_of_call(renderer)
    result = {"role": "tool", "tool_call_id": "call_0_0", "name": "add", "content": "3"}
    answers = {"answers": [two, two, two], "context_length": 100_000}
    async with (
        sglrl.launch(str(tmp_path), engine="fake", **answers) as client,  # type: ignore[arg-type]
        client.session(messages=ASK, tools=TOOLS) as session,
    ):
        for _ in range(2):
            turn = await session.generate(
                tool_choice="auto", parallel_tool_calls=False, max_new_tokens=2000
            )
            assert (turn.finish_reason, turn.stop_match) == ("stop", end)
            assert turn.output_ids.tolist() == two[: two.index(end) + 1]
            assert [call.name for call in turn.message.tool_calls] == ["add"]
            session.observe([result])
        whole = await session.generate(max_new_tokens=2000)
        assert len(whole.message.tool_calls) == 2
        trajectory = session.trajectory()
    assert trajectory.branches == ()
    ends = [FAMILIES[family].end, "<|tool_response>"]
    for before in trajectory.turns[:-1]:
        after = trajectory.response_ids[before.stop : before.stop + 1].tolist()
        assert tokenizer.decode(after) in ends
