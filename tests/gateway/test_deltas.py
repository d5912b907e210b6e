"""Streams of ten families' formats: the parts that were sent begin the parsed message."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from sessions.families import FAMILIES, family_tokenizer

from sglrl.gateway.deltas import Deltas, marks_calls
from sglrl.inference.renderer import Renderer, find_renderer
from sglrl.inference.sampling import SamplingParams
from sglrl.inference.tokens import TokenizerBox
from sglrl.wire.engine import TokenChunk

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {"type": "object", "properties": {"a": {"type": "string"}}},
        },
    }
]
ASK = [{"role": "user", "content": "Hi"}]
WORDS = ["one", " two", "\n", "  ", "é", "🙂", "{", "<", "0"]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def box(family: str, tmp_path_factory: pytest.TempPathFactory) -> TokenizerBox:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    family_tokenizer(folder, FAMILIES[family])
    return TokenizerBox(str(folder))


def renderer_of(box: TokenizerBox, family: str, tools: Any) -> Renderer:
    options = {"date_string": "26 Jul 2024"} if family == "llama-3" else {}
    found = find_renderer(FAMILIES[family].renderers[0], box, {**options, "tools": tools})
    assert found is not None
    return found


def streamed(
    box: TokenizerBox, renderer: Renderer | None, pieces: list[list[int]], **sampling: Any
) -> Any:
    requests = SimpleNamespace(decode=box.decode)
    spec: Any = SimpleNamespace(requests=requests, renderer=renderer)
    deltas = Deltas(spec, SamplingParams(**sampling))
    joined: dict[str, str] = {}
    for ids in pieces:
        # A weight update may abort a turn, which then goes on.
        finish = "abort" if len(ids) == 2 else ""
        data = np.array(ids, "<i4").tobytes()
        chunk = TokenChunk(ids=data, logprobs=b"", version=0, finish=finish)
        for part, text in deltas.add(chunk):
            assert text
            joined[part] = joined.get(part, "") + text
    assert joined == deltas.sent
    return joined


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["alone", "with tools"])
def test_what_is_sent_begins_the_message(family: str, box: TokenizerBox, tools: Any) -> None:
    renderer = renderer_of(box, family, tools)
    template = {"tools": tools, **({"date_string": "26 Jul 2024"} if family == "llama-3" else {})}
    (prompt,) = box.encode_rendered([box.render(ASK, template)])
    chance = random.Random(family)
    sent = {"content": 0, "reasoning_content": 0}
    for _ in range(60):
        said: dict[str, Any] = {"role": "assistant"}
        said["content"] = "".join(chance.choices(WORDS, k=chance.randint(0, 6)))
        if chance.random() < 0.5:
            thought = "".join(chance.choices(WORDS, k=chance.randint(1, 6)))
            said["reasoning_content"] = f"Hm{thought}"
        if tools and chance.random() < 0.5:
            function = {"name": "add", "arguments": {"a": "x"}}
            said["tool_calls"] = [{"id": "call_0", "type": "function", "function": function}]
            if family == "llama-3":
                said["content"] = ""  # its template omits it
        whole = box.render([*ASK, said], {**template, "add_generation_prompt": False})
        start = box.decode(prompt, False)
        if not whole.startswith(start):
            continue
        (ids,) = box.encode_rendered([whole[len(start) :].rstrip("\n")])
        pieces = []
        while ids:
            size = chance.randint(1, 4)
            pieces.append(ids[:size])
            ids = ids[size:]
        message = renderer.parse(prompt, [token for ids in pieces for token in ids], 0)
        for part, text in streamed(box, renderer, pieces).items():
            assert (getattr(message, part) or "").lstrip().startswith(text)
            sent[part] += len(text)
    if family in ("qwen3", "qwen3.5", "glm-4.5", "nemotron-3"):
        assert sent["content"] > 50
        assert sent["reasoning_content"] > 50


def test_formats_without_a_token_before_calls(family: str, box: TokenizerBox) -> None:
    assert marks_calls(renderer_of(box, family, TOOLS)) is (family != "llama-3")


def test_without_a_renderer_all_text_is_content(family: str, box: TokenizerBox) -> None:
    text = " one\n two  "
    (ids,) = box.encode_rendered([text])
    pieces = [ids[at : at + 2] for at in range(0, len(ids), 2)]
    assert streamed(box, None, pieces) == {"content": text}


def test_the_end_of_a_part_begins_no_stop_string(family: str, box: TokenizerBox) -> None:
    """Otherwise the rest of the reasoning would be sent after the content."""
    (ids,) = box.encode_rendered([f"Hm.ab{FAMILIES[family].end}"])
    pieces = [ids[at : at + 1] for at in range(len(ids))]
    sent = streamed(box, renderer_of(box, family, None), pieces, stop="abc")
    assert list(sent.values()) == ["Hm.ab"]
    assert list(streamed(box, None, pieces[:-1], stop="abc").values()) == ["Hm."]
