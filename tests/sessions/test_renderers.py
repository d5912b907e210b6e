"""Renderers against the chat templates of ten families of models."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest

from sglrl.errors import InvalidRequest
from sglrl.inference.renderer import Renderer, find_renderer
from sglrl.inference.tokens import TokenizerBox

from .families import FAMILIES, Family, family_tokenizer

Message = dict[str, Any]

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name} things — “all” of them",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "string"}, "n": {"type": "integer"}},
            },
        },
    }
    for name in ("add", "look_up")
]
WORDS = [
    "one", " two", "\n", "\n\n", "  ", "é", "日本", "🙂", "\u200d", "{", '"', "}", "\\n", "<", "|>",
    "q", "0", "<b>", "</b>", "&amp;", "\t", "…",
]  # fmt: skip


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


@pytest.fixture(scope="module")
def options(family: Family) -> dict[str, Any]:
    """Arguments of the template. Llama's has today's date unless it is given."""
    return {"date_string": "26 Jul 2024"} if family.template == "llama3_2" else {}


@pytest.fixture(scope="module")
def box(family: Family, tmp_path_factory: pytest.TempPathFactory) -> TokenizerBox:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    family_tokenizer(folder, family)
    return TokenizerBox(str(folder))


@pytest.fixture(scope="module")
def renderer(box: TokenizerBox, options: dict[str, Any]) -> Renderer:
    found = find_renderer(None, box, {**options, "tools": TOOLS})
    assert found is not None
    return found


def text(chance: random.Random, specials: list[str], most: int = 6) -> str:
    """Return difficult text. ``specials``: tokens that may be part of it."""
    return "".join(chance.choices([*WORDS, *specials], k=chance.randint(0, most)))


def answer(chance: random.Random, specials: list[str], reasons: bool, calls: int) -> Message:
    found: Message = {"role": "assistant", "content": text(chance, specials).strip()}
    if reasons:
        found["reasoning_content"] = text(chance, []).strip() or "Hm."
    if calls:
        found["tool_calls"] = [
            {
                "id": f"call_{i}",
                "type": "function",
                "function": {
                    "name": chance.choice(["add", "look_up"]),
                    "arguments": chance.choice(
                        [{}, {"a": text(chance, []).strip() or "x"}, {"a": "b", "n": 3}]
                    ),
                },
            }
            for i in range(calls)
        ]
    return found


def split(chance: random.Random, box: TokenizerBox, family: Family, whole: str) -> list[int]:
    """Return tokens of a text as a model may sample them: not those of the tokenizer."""
    names = sorted(family.tokens.split(), key=len, reverse=True)
    found: list[int] = []
    for part in re.split("(" + "|".join(map(re.escape, names)) + ")", whole):
        while part:
            size = len(part) if part in names else chance.randint(1, len(part))
            found += box.encode_rendered([part[:size]])[0]
            part = part[size:]
    return found


def test_it_is_found(family: Family, renderer: Renderer) -> None:
    assert renderer.name in family.renderers


def test_arguments_that_the_template_does_not_read(
    box: TokenizerBox, options: dict[str, Any], renderer: Renderer
) -> None:
    """Clients send arguments for other models. They do not matter."""
    given = {**options, "tools": TOOLS, "thinking": True, "verbosity": "low"}
    found = find_renderer(None, box, given)
    assert found is not None
    assert found.name == renderer.name


@pytest.mark.parametrize("seed", range(5))
def test_the_next_turn(
    family: Family, box: TokenizerBox, renderer: Renderer, options: dict[str, Any], seed: int
) -> None:
    """Random conversations: the bridge adds exactly what the template adds."""
    chance = random.Random(seed)
    template = {**options, "tools": TOOLS}
    bridged = 0
    for _ in range(20):
        # Text may contain the tokens of calls and reasoning, as in a question about templates.
        specials = chance.choice([[], [], family.tokens.split()])
        before: list[Message] = [{"role": "user", "content": text(chance, specials) or "Hi"}]
        if chance.random() < 0.5:
            before.insert(0, {"role": "system", "content": text(chance, specials) or "Be brief."})
        calls = chance.choice([0, 1, 1, 2])
        if family.template == "llama3_2":
            calls = min(calls, 1)
        said = answer(chance, [], chance.random() < 0.5, calls)
        if family.template == "llama3_2" and calls:
            said["content"] = ""  # the template omits it
        new: list[Message] = [
            {
                "role": "tool", "tool_call_id": f"call_{i}", "content": text(chance, specials),
                "name": said["tool_calls"][i]["function"]["name"],
            }
            for i in range(calls)
        ] or [{"role": "user", "content": text(chance, specials) or "Go on."}]  # fmt: skip
        start = box.render(before, template)
        (prompt,) = box.encode_rendered([start])
        closed = box.render([*before, said], {**template, "add_generation_prompt": False})
        if not closed.startswith(start):
            continue
        sampled_text = closed[len(start) :].rstrip("\n")
        if family.template == "glm4moe":
            # It has no token for the end of a turn: the model samples the next role.
            sampled_text += "<|observation|>" if calls else "<|user|>"
        cut = chance.random() < 0.2
        if cut:
            sampled_text = sampled_text[: chance.randint(0, len(sampled_text))]
        sampled = split(chance, box, family, sampled_text)
        found = renderer.bridge(prompt, sampled, new)
        whole = box.render([*before, said, *new], template)
        if found is None:
            continue
        bridged += 1
        assert found[: len(prompt) + len(sampled)] == [*prompt, *sampled]
        if not cut and whole.startswith(start + sampled_text):
            assert box.decode(found, False) == box.decode(box.encode_rendered([whole])[0], False)
        if not cut:
            parsed = renderer.parse(prompt, sampled, 3)
            functions = [call["function"] for call in said.get("tool_calls", ())]
            assert [(c.name, c.arguments, c.error) for c in parsed.tool_calls] == [
                (f["name"], f["arguments"], "") for f in functions
            ]
            assert parsed.content.strip() == said["content"]
            if family.template != "llama3_2":  # it has no format for reasoning
                reasoning = (parsed.reasoning_content or "").strip()
                # Gemma's has the name of its channel.
                reasoning = reasoning.removeprefix("thought\n")
                assert reasoning == said.get("reasoning_content", "")
    assert bridged


# --- a renderer of the user's own -----------------------------------------------------------------

OWN = """
from renderers.base import ParsedResponse, ParsedToolCall
from renderers.configs import DefaultRendererConfig
from renderers.default import DefaultRenderer

class Numbers(DefaultRenderer):
    config_class = DefaultRendererConfig

    def parse_response(self, token_ids, *, tools=None, prompt_ids=None):
        name = tools[0]["function"]["name"]
        call = ParsedToolCall(raw="!", name=name, arguments={"n": token_ids})
        return ParsedResponse(content=str(len(prompt_ids)), tool_calls=[call])

class NoConfig:
    pass
"""


@pytest.fixture
def qwen(tmp_path: Path) -> TokenizerBox:
    family_tokenizer(tmp_path, FAMILIES["qwen3"])
    return TokenizerBox(str(tmp_path))


def test_your_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, qwen: TokenizerBox) -> None:
    file = tmp_path / "own_renderer.py"
    file.write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    for place in ("own_renderer", str(file)):
        found = find_renderer(f"{place}:Numbers", qwen, {"tools": TOOLS})
        assert found is not None
        ask = [{"role": "user", "content": "Hi"}]
        (prompt,) = qwen.encode_rendered([qwen.render(ask, {"tools": TOOLS})])
        assert found.difference(ask, prompt) == ""
        said = found.parse(prompt, [7, 8], 2)
        assert said.content == str(len(prompt))
        assert [(c.id, c.name, c.arguments) for c in said.tool_calls] == [
            ("call_2_0", "add", {"n": [7, 8]})
        ]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere:Numbers", "No module named 'nowhere'"),
        ("{file}:Letters", "has no attribute 'Letters'"),
        ("{file}x:Numbers", "does not exist"),
        ("{file}:NoConfig", "must set config_class"),
        ("numbers", "and your own, as 'module:Class'"),
    ],
)
def test_your_own_cannot_be_loaded(
    tmp_path: Path, qwen: TokenizerBox, name: str, message: str
) -> None:
    file = tmp_path / "own.py"
    file.write_text(OWN)
    with pytest.raises(InvalidRequest, match=re.escape(message)):
        find_renderer(name.format(file=file), qwen, {})
