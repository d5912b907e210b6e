"""A client sends an answer back, exact or stripped: the next prompt has the sampled tokens."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import pytest_asyncio
from sessions.families import FAMILIES, family_tokenizer

import sglrl
from sglrl.gateway.app import Endpoints
from sglrl.gateway.registry import Registry
from sglrl.gateway.settings import Settings
from sglrl.sessions.turn_sampler import TurnSampler
from sglrl.wire.engine import TokenChunk

from .made import completion

pytestmark = pytest.mark.asyncio(loop_scope="module")
ADD = {"type": "object", "properties": {"a": {"type": "string"}}}
CALL = '<tool_call>\n{"arguments":{"a":  "\\ud83d"},\n "name":"add"}</tool_call>'
"""Its white space and the order of its fields are not the template's, nor is the surrogate text."""
ANSWERS = [
    "Hello ", " \n Hello\n", "", " ", "\u3000é\u00a0",
    "Hello \n<tool_call>\n{bad}\n</tool_call>\n and so on ",
    'Hello <tool_call>{"name": "add", "argum',
    "<tool_call> x",
    CALL,
    f"So {CALL} and <tool_call>bad",
]  # fmt: skip


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[sglrl.Client]:
    folder: Path = tmp_path_factory.mktemp("qwen3")
    family_tokenizer(folder, FAMILIES["qwen3"])
    async with sglrl.launch(str(folder), engine="fake") as client:
        yield client


@pytest_asyncio.fixture(loop_scope="module")
async def gateway(pool: sglrl.Client) -> AsyncIterator[Endpoints]:
    """A gateway in this process, whose turns a test can replace."""
    registry = Registry(pool, expire_after=600, most=10)
    made = Endpoints(pool, registry, Settings(names=("tiny",)))
    yield made
    made.close()
    await registry.close()


@pytest.fixture
def says(pool: sglrl.Client, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that sets the text of the next turn, in pieces that are tokenized alone."""
    texts: list[list[str]] = []

    async def sample(self: Any, ids: bytes, prepared: Any, top: int, on_chunk: Any, _: int) -> Any:
        found: list[int] = []
        for piece in texts.pop(0):
            found += pool.tokenizer.encode(piece, add_special_tokens=False)
        end = pool.tokenizer.eos_token_id
        found.append(end)
        prompt = np.frombuffer(ids, "<i4").tolist()
        decode = self._spec.requests.decode
        made = completion(found, prompt=prompt, decode=decode, finish="stop", stop_match=end)
        if on_chunk is not None:
            for token in found[:-1]:
                on_chunk(TokenChunk(np.array([token], "<i4").tobytes()))
            on_chunk(TokenChunk(np.array([end], "<i4").tobytes(), finish="stop", stop_match=end))
        return made

    monkeypatch.setattr(TurnSampler, "sample", sample)
    return lambda *text: texts.append(list(text))


class Chat:
    """An agent that speaks OpenAI's chat completions."""

    path = "/chat/completions"

    def __init__(self) -> None:
        self.messages: list[Any] = []

    def body(self) -> dict[str, Any]:
        function = {"name": "add", "parameters": ADD}
        return {"messages": self.messages, "tools": [{"type": "function", "function": function}]}

    def ask(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})

    def answered(self, found: Any, strips: bool) -> str:
        message = found["choices"][0]["message"]
        text = message["content"] or ""
        back = {"role": "assistant", "content": text.strip() if strips else message["content"]}
        if message.get("tool_calls"):
            back["tool_calls"] = message["tool_calls"]
        self.messages.append(back)
        for call in message.get("tool_calls") or ():
            result = {"role": "tool", "tool_call_id": call["id"], "content": "3"}
            self.messages.append(result)
        return str(text)


class Messages(Chat):
    """An agent that speaks Anthropic's Messages."""

    path = "/messages"

    def body(self) -> dict[str, Any]:
        tools = [{"name": "add", "input_schema": ADD}]
        return {"messages": self.messages, "tools": tools, "max_tokens": 1000}

    def ask(self, text: str) -> None:
        block = {"type": "text", "text": text}
        if self.messages and self.messages[-1]["role"] == "user":
            self.messages[-1]["content"].append(block)
        else:
            self.messages.append({"role": "user", "content": [block]})

    def answered(self, found: Any, strips: bool) -> str:
        content = found["content"]
        text = "".join(block["text"] for block in content if block["type"] == "text")
        back = [dict(block) for block in content]
        for block in back:
            if strips and block["type"] == "text":
                block["text"] = block["text"].strip()
        self.messages.append({"role": "assistant", "content": back})
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": "3"}
            for block in content
            if block["type"] == "tool_use"
        ]
        if results:
            self.messages.append({"role": "user", "content": results})
        return text


class Responses(Chat):
    """An agent that speaks OpenAI's Responses."""

    path = "/responses"

    def body(self) -> dict[str, Any]:
        tools = [{"type": "function", "name": "add", "parameters": ADD}]
        return {"input": self.messages, "tools": tools}

    def answered(self, found: Any, strips: bool) -> str:
        text = ""
        for item in found["output"]:
            if item["type"] == "message":
                for part in item["content"]:
                    text += part["text"]
                    part["text"] = part["text"].strip() if strips else part["text"]
            self.messages.append(item)
        for item in found["output"]:
            if item["type"] == "function_call":
                self.messages.append(
                    {"type": "function_call_output", "call_id": item["call_id"], "output": "3"}
                )
        return text


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("dialect", [Chat, Messages, Responses])
@pytest.mark.parametrize("strips", [False, True])
async def test_the_next_prompt(
    pool: sglrl.Client,
    gateway: Endpoints,
    says: Any,
    dialect: type[Chat],
    answer: str,
    strips: bool,
) -> None:
    session = gateway.registry.open()
    transport = httpx.ASGITransport(app=gateway.app)
    url = f"http://gateway/sessions/{session.id}/v1"
    async with httpx.AsyncClient(transport=transport) as http:
        agent = dialect()
        for turn in range(3):
            # Clients also cut a text in the middle of a pair.
            agent.ask("Go on. \ud83d")
            says(answer[: 3 * turn], answer[3 * turn :])
            body = json.dumps({"model": "tiny", **agent.body()})
            got = await http.post(url + agent.path, content=body)
            assert got.status_code == 200, (body, got.text)
            text = agent.answered(json.loads(got.content), strips)
            # A call whose special token is sampled in pieces is text.
            assert text.strip() in (answer.strip(), answer.replace(CALL, "").strip())
    trajectory = session.conversations.trajectory()
    assert trajectory is not None
    assert [len(leaf.turns) for leaf in trajectory.leaves] == [3]


@pytest.mark.parametrize("dialect", [Chat, Messages, Responses])
async def test_lone_surrogates(gateway: Endpoints, dialect: type[Chat]) -> None:
    """Only the texts of the conversation may have them, and nothing else is accepted with them."""
    transport = httpx.ASGITransport(app=gateway.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway/v1") as http:
        agent = dialect()
        agent.ask("\ud83d and \ude00, \ud83d\ude00")
        body = agent.body()
        limit = "max_tokens" if "messages" in body else "max_output_tokens"
        text = json.dumps({**body, limit: 2})
        got = await http.post(agent.path, content=text)
        assert got.status_code == 200, got.text
        for change in ({"model": "\ud83d"}, {"stop": ["\ud83d"]}, {"\ud83d": 1}):
            got = await http.post(agent.path, content=json.dumps({**body, **change}))
            assert got.status_code == 400
            assert "lone surrogate" in got.json()["error"]["message"]
        for broken in (text[:-1], text.replace("2}", "NaN}"), f"[{text}]"):
            got = await http.post(agent.path, content=broken)
            assert got.status_code == 400
            assert "is not a JSON object" in got.json()["error"]["message"]
