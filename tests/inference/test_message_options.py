"""The options of messages: ``generate`` and ``stream`` take the same ones."""

from __future__ import annotations

import typing
from pathlib import Path
from typing import Any

import pytest
from sessions.families import FAMILIES, family_tokenizer

import sglrl
from sglrl.inference.options import MessageKeywords, RenderOptions

from .sampling_examples import received_sampling

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
HI = [{"role": "user", "content": "Hi"}]
BEGUN = [*HI, {"role": "assistant", "content": "A"}]
CASES: dict[str, dict[str, Any]] = {
    "tools": {"tools": [TOOL]},
    "template": {"template": {"enable_thinking": False}},
    "chat_template_kwargs": {"chat_template_kwargs": {"enable_thinking": False}},
    "continue_final_message": {"messages": BEGUN, "continue_final_message": True},
    "renderer": {"renderer": "qwen3"},
    "tool_choice": {"tools": [TOOL], "tool_choice": "required"},
    "grammar": {"regex": "[ab]+"},
    "grammar of a prompt": {"prompt": HI, "messages": None, "regex": "[ab]+"},
}
LIMITED = {"tool_choice", "grammar", "grammar of a prompt"}
"""The cases in which a grammar of whole turns limits what is sampled."""


def test_the_keywords_are_the_fields() -> None:
    hints = typing.get_type_hints(RenderOptions)
    assert {name: hints[name] for name in RenderOptions.__struct_fields__} == (
        typing.get_type_hints(MessageKeywords)
    )


async def test_a_stream_is_like_a_call(tmp_path: Path) -> None:
    family_tokenizer(tmp_path, FAMILIES["qwen3"])
    async with sglrl.launch(str(tmp_path), engine="fake") as client:
        for name, values in CASES.items():
            given: dict[str, Any] = {"messages": HI, "max_new_tokens": 3, "seed": 1, **values}
            with received_sampling() as received:
                expected = await client.generate(**given)
                stream = client.stream(**given)
                chunks = [chunk async for chunk in stream]
            made = stream.completion
            assert received[0] == received[1], name
            assert ("structural_tag" in received[0]) == (name in LIMITED), name
            assert made.prompt_ids.tolist() == expected.prompt_ids.tolist(), name
            assert [i for chunk in chunks for i in chunk.output_ids] == [*expected.output_ids], name
            assert made.__dict__.get("message") == expected.__dict__.get("message"), name
            assert ("message" in made.__dict__) == (name in {*LIMITED, "tools", "renderer"}), name
        for option in ({"tools": [TOOL]}, {"tool_choice": "required"}, {"renderer": "qwen3"}):
            stream = client.stream(input_ids=[1], **option)  # type: ignore[arg-type]
            with pytest.raises(sglrl.InvalidRequest, match="is for messages"):
                await anext(aiter(stream))
