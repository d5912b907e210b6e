"""Tools and system messages that the model cannot be shown."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from sessions.families import FAMILIES, family_tokenizer

import sglrl
from sglrl import GatewayOptions, InvalidRequest, UsageError
from sglrl.gateway.dialect import TurnRequest
from sglrl.gateway.filtering import Filtering
from sglrl.inference.chat_templates import template_shows_system
from sglrl.inference.tokens import TokenizerBox
from sglrl.launching.tiny_model import make_model


def message(text: str) -> dict[str, Any]:
    """Return a message: "s1" is one of the system, "u1" of the user, "a1" of the assistant."""
    roles = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    return {"role": roles[text[0]], "content": text[1:]}


@pytest.mark.parametrize(
    ("given", "how", "expected"),
    [
        ("s1 u1", "user", "s1 u1"),
        ("u1 a1 u2", "merge", "u1 a1 u2"),
        ("s1 s2 u1 s3 a1", "keep", "s1 s2 u1 s3 a1"),
        ("s1 s2 u1 s3 a1 t1 s4", "user", "s1+2 u1 u3 a1 t1 u4"),
        ("s1 s2 u1 s3 a1 t1 s4", "merge", "s1+2+3+4 u1 a1 t1"),
        ("u1 s1 a1", "user", "u1 u1 a1"),
        ("u1 s1 a1", "merge", "s1 u1 a1"),
    ],
)
def test_later_system_messages(given: str, how: str, expected: str) -> None:
    request = TurnRequest(messages=[message(one) for one in given.split()])
    shown = Filtering(GatewayOptions(later_system=how)).shown(request)
    found = [
        {**one, "content": one["content"].replace("\n\n", "+")} for one in shown.messages or ()
    ]
    assert found == [message(one) for one in expected.split()]


def test_a_template_without_a_place_for_them() -> None:
    keep = Filtering(GatewayOptions(), shows_system=False)
    fits = TurnRequest(messages=[message("s1"), message("u1")])
    assert keep.shown(fits) is fits
    assert keep.shown(TurnRequest(prompt="x")).messages is None
    later = TurnRequest(messages=[message("u1"), message("s1")])
    with pytest.raises(InvalidRequest, match=r"message 1 is a system message.*later_system="):
        keep.shown(later)


@pytest.mark.parametrize(("family", "shows"), [("qwen3", True), ("qwen3.5", False)])
def test_the_templates_of_models(family: str, shows: bool, tmp_path: Path) -> None:
    family_tokenizer(tmp_path, FAMILIES[family])
    assert template_shows_system(TokenizerBox(str(tmp_path))) is shows


def test_tools_are_left_out_if_the_operator_allows_it(caplog: pytest.LogCaptureFixture) -> None:
    search, found = "tools[3] of type 'web_search'", "tools[1] of type 'web_search'"
    with pytest.raises(InvalidRequest) as error:
        Filtering(GatewayOptions()).check_tools(TurnRequest(left_out=[search]))
    assert search in str(error.value)
    assert 'unsupported_tools="omit"' in str(error.value)
    omits = Filtering(GatewayOptions(unsupported_tools="omit"))
    with caplog.at_level(logging.WARNING, "sglrl.gateway"):
        for left_out in ([search], [found, "mcp_servers"], [search, "mcp_servers"]):
            omits.check_tools(TurnRequest(left_out=left_out))
    kinds = [record.getMessage().partition(" cannot")[0] for record in caplog.records]
    assert kinds == ["a tool of type 'web_search'", "mcp_servers"]


def test_wrong_options() -> None:
    for name in ("unsupported_tools", "later_system"):
        with pytest.raises(UsageError, match=f"{name} must be one of .*, got 'x'"):
            GatewayOptions(**{name: "x"})


async def agent(session: sglrl.Session, item: Any) -> float:
    import httpx

    tools = [{"type": "web_search"}]
    async with httpx.AsyncClient(timeout=60) as http:
        for _ in range(2):
            made = await http.post(
                f"{session.base_url}/responses",
                json={"input": "Hi", "tools": tools, "max_output_tokens": 4},
            )
    session.metadata["answer"] = made.text
    return float(made.status_code)


@pytest.mark.parametrize("processes", [None, 1])
async def test_a_rollout_has_the_options(processes: int | None) -> None:
    with pytest.raises(UsageError, match="gateway must be a bool or"):
        sglrl.rollout(None, agent, [0], gateway="omit")  # type: ignore[arg-type]
    async with sglrl.launch("tiny", engine="fake") as client:
        options: dict[str, Any] = {"processes": processes, "on_error": "raise"}
        omits = GatewayOptions(unsupported_tools="omit")
        async with sglrl.rollout(client, agent, [0], gateway=omits, **options) as run:
            (group,) = [group async for group in run]
        (trajectory,) = group.trajectories
        assert trajectory.reward == 200.0, trajectory.metadata
        # Each request is an error, so there is no turn.
        with pytest.raises(UsageError, match="before a turn was sampled"):
            async with sglrl.rollout(client, agent, [0], gateway=True, **options) as run:
                assert not [group async for group in run]


async def test_tools_that_the_template_does_not_write(tmp_path: Path) -> None:
    import httpx

    function = {"name": "add", "description": "", "parameters": {"type": "object"}}
    responses = [{"type": "function", **function}]
    chat = [{"type": "function", "function": function}]
    model = make_model(tmp_path, characters="0123456789")
    async with (
        sglrl.launch(model, engine="fake") as client,
        sglrl.serve(client, name="x") as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=60) as http,
    ):
        for path, body in (
            ("/v1/responses", {"input": "1", "tools": responses}),
            ("/v1/chat/completions", {"messages": [message("u1")], "tools": chat}),
        ):
            for stream in (False, True):
                made = await http.post(path, json={"model": "x", "stream": stream, **body})
                assert made.status_code == 400, made.text
                assert "shows no tools: omit tools" in made.json()["error"]["message"]
            made = await http.post(path, json={"model": "x", "tool_choice": "none", **body})
            assert made.status_code == 200, made.text
