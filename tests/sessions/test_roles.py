"""A message whose role the chat template does not know is rejected, and is never left out."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

import sglrl
from sglrl.errors import InvalidRequest
from sglrl.gateway.app import Endpoints
from sglrl.gateway.registry import Registry
from sglrl.gateway.settings import Settings
from sglrl.inference.tokens import TokenizerBox

from .families import FAMILIES, family_tokenizer

pytestmark = pytest.mark.asyncio(loop_scope="module")
USER = {"role": "user", "content": "Hi"}
ROLES = [
    "system", "developer", "user", "tool", "function", "ipython", "observation",
    "critic", "User", "",
]  # fmt: skip
ANY = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


def message(role: str) -> dict[str, Any]:
    return {"role": role, "content": "XYZ", "tool_call_id": "a", "name": "add"}


@pytest.mark.parametrize("name", FAMILIES)
async def test_each_message_is_in_the_prompt(tmp_path: Path, name: str) -> None:
    """Compare with what the template itself makes of the conversation."""
    tokenizer = family_tokenizer(tmp_path, FAMILIES[name])
    box = TokenizerBox(str(tmp_path))
    rejected = []
    for role in ROLES:
        for messages in ([message(role), USER], [USER, message(role)]):
            try:
                whole = tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=True
                )
            except Exception:
                # The template has an error of its own.
                with pytest.raises(InvalidRequest, match="rejects these messages"):
                    box.render(messages)
                continue
            if "XYZ" in whole:
                assert box.render(messages) == whole
            elif role not in ("system", "tool"):
                rejected.append(role)
                with pytest.raises(InvalidRequest, match=f"of the role {role!r}, here message"):
                    box.render(messages)
    assert bool(rejected) == (name in ("qwen3", "glm-4.5")), rejected
    # A template that writes all roles knows all roles.
    assert "<critic>XYZ" in box.render([USER, message("critic")], {"chat_template": ANY})


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[sglrl.Client]:
    folder: Path = tmp_path_factory.mktemp("qwen3")
    family_tokenizer(folder, FAMILIES["qwen3"])
    async with sglrl.launch(str(folder), engine="fake") as client:
        yield client


async def test_everywhere(client: sglrl.Client) -> None:
    wrong, says = message("critic"), "the role 'critic', here message 1; use one of the roles 'sys"
    with pytest.raises(InvalidRequest, match=says):
        await client.generate(messages=[USER, wrong], max_new_tokens=2)
    with pytest.raises(InvalidRequest, match=says):
        await client.generate(messages=[[USER], [USER, wrong]], max_new_tokens=2)
    async with client.session(messages=[USER, wrong], max_new_tokens=2) as session:
        with pytest.raises(InvalidRequest, match=says):
            await session.generate()
    async with client.session(messages=[USER], max_new_tokens=2) as session:
        await session.generate()
        session.observe([message("tool"), wrong])
        with pytest.raises(InvalidRequest, match="'critic', here message 3"):
            await session.generate()
        session.unobserve()
        session.rewrite([wrong])
        with pytest.raises(InvalidRequest, match="'critic', here message 0"):
            await session.generate()


async def test_over_http(client: sglrl.Client) -> None:
    registry = Registry(client, expire_after=600, most=10)
    gateway = Endpoints(client, registry, Settings(names=("tiny",)))
    transport = httpx.ASGITransport(app=gateway.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway/v1") as http:
        for field, path in (
            ("messages", "chat/completions"),
            ("messages", "messages"),
            ("input", "responses"),
        ):
            body = {field: [USER, {"role": "critic", "content": "XYZ"}]}
            limit = "max_output_tokens" if field == "input" else "max_tokens"
            got = await http.post(path, content=json.dumps({**body, limit: 2}))
            assert got.status_code == 400
            assert "critic" in got.json()["error"]["message"]
        # OpenAI's newer name for "system" is known, whatever the template.
        body = {"messages": [{"role": "developer", "content": "XYZ"}, USER], "max_tokens": 2}
        assert (await http.post("chat/completions", json=body)).status_code == 200
    gateway.close()
    await registry.close()
